"""The slots of this process: on which shelf, in whose use, and what becomes of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from l3store.backends.nvme.eviction import POLICIES, LeafLRU
from l3store.backends.nvme.index import SLOT_BITS
from l3store.backends.nvme.journal import Entry
from l3store.backends.nvme.shelf import Shelf

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from l3store.backends.nvme.catalog import Catalog
    from l3store.backends.nvme.format import Geometry
    from l3store.backends.nvme.members import Members
    from l3store.backends.nvme.segment import Segment
    from l3store.backends.nvme.shelf import Run

__all__ = ["Holdings"]


class Holdings:
    """Guarded by the store's lock."""

    def __init__(self, catalog: Catalog, members: Members, evict: str) -> None:
        self.shelves: dict[str, Shelf] = {}
        self.reading: dict[object, Collection[int]] = {}
        """Index values of the slots that a running call of this process reads."""
        self.writing: dict[object, Sequence[Run]] = {}
        """Slots that a running call of this process fills."""
        self.retired: list[tuple[Segment, int]] = []
        """Slots without a page that somebody still reads; free afterwards."""
        self._unsynced: set[Segment] = set()  # records were cleared, and no sync has covered it
        self._catalog, self._members, self._evict = catalog, members, evict
        catalog.on_gone, catalog.on_touch = self.gone, self._touched

    def owns(self, segment: Segment) -> bool:
        """Returns whether this process is the writer of a segment."""
        return segment.block.writer in self._members.mine

    def owned(self) -> list[Segment]:
        """Returns all own segments."""
        return [segment for segment in self._catalog.segments.values() if self.owns(segment)]

    def _shelf(self, place: str, geometry: Geometry) -> Shelf:
        shelf = self.shelves.get(place)
        # One without segments may be of a length that another process was first to settle.
        if shelf is None or (shelf.geometry != geometry and not shelf.segments):
            shelf = self.shelves[place] = Shelf(geometry, POLICIES.get(self._evict, LeafLRU)())
        return shelf

    def _holder(self, segment: Segment) -> Shelf | None:
        """Returns the shelf that a segment is on, if it is on one."""
        shelf = self.shelves.get(segment.place)
        return shelf if shelf is not None and segment in shelf else None

    def _busy(self) -> set[Segment]:
        """Returns the segments that a running call of this process reads or fills."""
        busy = {run[0] for runs in self.writing.values() for run in runs}
        busy |= {
            self._catalog.segments[location >> SLOT_BITS]
            for locations in self.reading.values()
            for location in locations
            if location >> SLOT_BITS in self._catalog.segments
        }
        return busy

    def tell(self, kind: int, runs: Iterable[Run], generation: int = 0) -> None:
        """Writes what happened to own slots into their writers' journals.

        Args:
            kind: As in `journal`.
            runs: The slots.
            generation: What to add to a slot's number to get its generation.

        Raises:
            OSError: A journal cannot be written.
        """
        by_writer: dict[bytes, list[Entry]] = {}
        for segment, first, count in runs:
            by_writer.setdefault(segment.block.writer, []).append(
                Entry(kind, segment.number, first, count, generation + first)
            )
        for identity, entries in by_writer.items():
            self._members.mine[identity].journal.append(entries)

    def gone(self, segment: Segment, slots: Sequence[int]) -> None:
        """The pages in these slots are gone, and not by eviction: their slots become free."""
        shelf = self._holder(segment)
        if shelf is None:
            return
        if self._catalog.segments.get(segment.number) is not segment:
            shelf.drop(segment)
            return
        shelf.policy.removed([shelf.number(segment, slot) for slot in slots])
        self._unsynced.add(segment)
        self.retired += [(segment, slot) for slot in slots]
        self.free_retired()

    def free_retired(self) -> None:
        """Frees the retired slots that nobody reads any more."""
        if not self.retired:
            return
        reading = {location for locations in self.reading.values() for location in locations}
        kept = []
        for segment, slot in self.retired:
            shelf = self._holder(segment)
            if shelf is None:
                continue
            if segment.number << SLOT_BITS | slot in reading:
                kept.append((segment, slot))
            elif segment.pages[slot] is None:
                shelf.give(segment, [slot])
        self.retired = kept

    def used(self, places: Iterable[str], locations: Collection[int]) -> None:
        """Pages of these places were read or set again."""
        for place in places:
            shelf = self.shelves.get(place)
            if shelf is not None and (slots := shelf.numbers(locations)):
                shelf.used_at = time.monotonic()
                shelf.policy.used(slots)

    def _touched(self, segment: Segment, slots: Iterable[int]) -> None:
        shelf = self._holder(segment)
        if shelf is not None:
            shelf.policy.used([shelf.number(segment, slot) for slot in slots])
