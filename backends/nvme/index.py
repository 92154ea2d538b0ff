"""Where pages lie: places, page hashes, slots. In memory alone."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from l3store import page
from l3store.backends.nvme.segment import Files, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from l3store.backends.nvme.format import Superblock

__all__ = ["SLOT_BITS", "At", "Index", "Place"]

SLOT_BITS = 20
"""Of an index value: segment number << 20 | slot."""
_SLOT = (1 << SLOT_BITS) - 1


class At(NamedTuple):
    """Where a page lies."""

    segment: Segment
    slot: int


class Place:
    """The pages of one place; guarded by the store's lock."""

    __slots__ = ("digest", "doubles", "name", "pages", "payload_bytes", "segments", "unproved")

    def __init__(self, name: str, payload_bytes: int) -> None:
        self.name, self.payload_bytes = name, payload_bytes
        self.digest = page.place_digest(name)
        self.pages: dict[bytes, int] = {}
        """Page hash -> segment number << 20 | slot."""
        self.unproved: dict[bytes, int] = {}
        """The same for pages that must be read before anybody is told that they exist."""
        self.doubles: dict[bytes, list[int]] = {}
        """Second copies that another writer stored at the same moment."""
        self.segments = 0


class Index:
    """The pages of one open store. Guarded by `lock`."""

    def __init__(self, files: Files) -> None:
        self.lock = threading.Lock()
        """The store's lock: of the index, the shelves, and all that says so."""
        self.places: dict[str, Place] = {}
        self.segments: dict[int, Segment] = {}
        self.on_gone: Callable[[Segment, list[int]], None] = lambda _segment, _slots: None
        """Called for slots of which somebody else removed the page."""
        self._files = files

    # -- looking up --------------------------------------------------------------------------

    def at(self, location: int) -> At:
        """Returns the segment and slot that an index value means."""
        return At(self.segments[location >> SLOT_BITS], location & _SLOT)

    def found(
        self, stretches: Iterable[tuple[str, Sequence[bytes]]], *, unproved: bool = False
    ) -> list[int | None]:
        """Returns where each page lies.

        Args:
            stretches: Places and page hashes, as `keys.split_keys` gives them.
            unproved: Also of pages that nobody has checked.
        """
        found: list[int | None] = []
        for name, hashes in stretches:
            place = self.places.get(name)
            if place is None:
                found += [None] * len(hashes)
                continue
            here = list(map(place.pages.get, hashes))
            if unproved and place.unproved:
                doubtful = place.unproved.get
                pairs = zip(here, hashes, strict=True)
                here = [at if at is not None else doubtful(value) for at, value in pairs]
            found += here
        return found

    def check_lengths(self, lengths: Mapping[str, int]) -> None:
        """Checks the payload bytes of places against what is stored there.

        Raises:
            ValueError: Pages of one of them have another length in this store.
        """
        for name, length in lengths.items():
            place = self.places.get(name)
            if place is not None and place.payload_bytes != length:
                raise ValueError(
                    f"pages of {name} have {place.payload_bytes} payload bytes in this store, "
                    f"not {length}"
                )

    # -- changes -----------------------------------------------------------------------------

    def add(self, segment: Segment, slot: int, value: bytes, *, proved: bool = True) -> None:
        """A page lies in a slot."""
        if segment.pages[slot] is not None:
            self.remove(segment, slot)
        segment.pages[slot] = value
        place, location = self.places[segment.place], segment.number << SLOT_BITS | slot
        if not proved:
            segment.unproved.add(slot)
        table = place.pages if proved else place.unproved
        if table.setdefault(value, location) != location:
            place.doubles.setdefault(value, []).append(location)

    def remove(self, segment: Segment, slot: int) -> bool:
        """No page lies in a slot any more; a second copy takes its place. Returns if one did."""
        value = segment.pages[slot]
        if value is None:
            return False
        segment.pages[slot] = None
        proved = slot not in segment.unproved
        segment.unproved.discard(slot)
        place, location = self.places[segment.place], segment.number << SLOT_BITS | slot
        table = place.pages if proved else place.unproved
        doubles = place.doubles.get(value)
        if doubles and location in doubles:
            doubles.remove(location)
        elif table.get(value) == location:
            del table[value]
            if doubles:
                other, slot = self.at(doubles.pop())
                other.pages[slot] = None
                self.add(other, slot, value, proved=slot not in other.unproved)
        if doubles == []:
            place.doubles.pop(value, None)
        return True

    def prove(self, segment: Segment, slot: int) -> None:
        """The page in a slot was read and is whole."""
        if slot not in segment.unproved:
            return
        value = segment.pages[slot]
        self.remove(segment, slot)
        if value is not None:
            self.add(segment, slot, value)

    # -- segments ----------------------------------------------------------------------------

    def install(self, block: Superblock) -> Segment:
        """Takes a segment in, without its pages; what had its number before is gone."""
        old = self.segments.get(block.number)
        if old is not None:
            self.drop(old)
        segment = self.segments[block.number] = Segment(block, self._files)
        place = self.places.get(block.place)
        if place is None:
            place = self.places[block.place] = Place(block.place, block.geometry.payload_bytes)
        place.segments += 1
        return segment

    def drop(self, segment: Segment) -> None:
        """A segment and all pages in it are gone."""
        slots = [slot for slot, value in enumerate(segment.pages) if value is not None]
        for slot in slots:
            self.remove(segment, slot)
        if self.segments.get(segment.number) is segment:
            del self.segments[segment.number]
        place = self.places[segment.place]
        place.segments -= 1
        if not place.segments:
            del self.places[segment.place]
        self._files.forget(segment)
        self.on_gone(segment, slots)
