"""`check_integrity`: does what this process believes agree with the files, and with itself?"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from l3store.backends.nvme.catalog import segment_numbers
from l3store.backends.nvme.index import SLOT_BITS
from l3store.backends.nvme.segment import segment_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from l3store.backends.nvme.catalog import Catalog
    from l3store.backends.nvme.estate import Estate
    from l3store.backends.nvme.segment import Segment

__all__ = ["problems"]

_LOOKS = 10
_LOOK_AGAIN_SECONDS = 0.02


def problems(catalog: Catalog, estate: Estate, folder: int, segments: int) -> list[str]:
    """Returns what does not agree, one sentence each; none when all is well.

    Holds the store's lock and reads all slot tables (0.4 % of the store at 64 KiB a page).

    Raises:
        OSError: The store cannot be read.
    """
    with catalog.lock:
        catalog.refresh()
        return [
            *_files(catalog, folder, segments),
            *(found for segment in list(catalog.segments.values())
              for found in _records(catalog, estate, segment)),
            *_index(catalog),
            *_slots(estate),
        ]  # fmt: skip


def _files(catalog: Catalog, folder: int, segments: int) -> Iterator[str]:
    numbers = segment_numbers(folder)
    if len(numbers) > segments:
        yield f"{len(numbers)} segment files, but the capacity is {segments}"
    for number in sorted({*numbers, *catalog.segments}):
        try:
            size = os.stat(segment_name(number), dir_fd=folder, follow_symlinks=False).st_size
        except FileNotFoundError:
            catalog.refresh()  # its writer may have given it up just now
            if number in catalog.segments:
                yield f"{segment_name(number)} is gone, and pages are believed to be in it"
            continue
        # What somebody makes just now, or was killed over, is nothing yet: the next one takes it.
        begun = number not in catalog.segments and catalog.is_dead(number)
        if size != catalog.segment_bytes and not begun:
            yield f"{segment_name(number)} has {size} bytes, not {catalog.segment_bytes}"


def _records(catalog: Catalog, estate: Estate, segment: Segment) -> Iterator[str]:
    settled, found = estate.settled(segment), list[tuple[int, bytes | None, bytes | None]]()
    for _ in range(_LOOKS):
        try:
            live = {slot: value for slot, value, _ in catalog.live(segment)}
        except FileNotFoundError:
            return  # given up: `_files` knows more
        catalog.refresh()  # its writer, or who deletes pages, may have cleared a slot just now
        if catalog.segments.get(segment.number) is not segment:
            return
        found = [
            (slot, value, live.get(slot))
            for slot, value in enumerate(segment.pages)
            # What is not told yet by its writer is none of ours; nor will it be told, if that was
            # killed, before the segment is ours.
            if live.get(slot) != value
            and (settled or value is not None)
            and not _being_filled(estate, segment, slot)
        ]
        if not found:
            break
        time.sleep(_LOOK_AGAIN_SECONDS)
    for slot, value, there in found:
        what = "a page of its own" if value is None else f"page {value.hex()}"
        name = segment_name(segment.number)
        yield f"{name} slot {slot}: {what} expected, {there.hex() if there else 'none'} found"


def _being_filled(estate: Estate, segment: Segment, slot: int) -> bool:
    return any(
        run[0] is segment and run[1] <= slot < run[1] + run[2]
        for runs in estate.writing.values()
        for run in runs
    )


def _index(catalog: Catalog) -> Iterator[str]:
    for place in catalog.places.values():
        for table in (place.pages, place.unproved):
            for value, location in table.items():
                segment = catalog.segments.get(location >> SLOT_BITS)
                slot = location & (1 << SLOT_BITS) - 1
                if segment is None or segment.pages[slot] != value:
                    yield f"page {place.name}/{value.hex()} is not where the index says"


def _slots(estate: Estate) -> Iterator[str]:
    for name, shelf in estate.shelves.items():
        if any(segment.failed for segment in shelf.segments):
            continue  # its slots are left alone
        live = sum(value is not None for segment in shelf.segments for value in segment.pages)
        if len(shelf.policy) != live:
            yield f"{name}: {live} pages, but {len(shelf.policy)} can be evicted"
        retired = sum(segment in shelf for segment, _ in estate.retired)
        filling = sum(run[2] for runs in estate.writing.values() for run in runs if run[0] in shelf)
        slots = len(shelf.segments) * shelf.geometry.slots
        if slots != shelf.space.free + live + retired + filling:
            yield (
                f"{name}: {slots} slots, but {shelf.space.free} free, {live} live, "
                f"{retired} retired, {filling} being filled"
            )
