"""Room for pages: what is free, what grows, what is evicted; and pages that come and go."""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from l3store.backends.nvme import journal
from l3store.backends.nvme.format import DEAD
from l3store.backends.nvme.growth import Growth
from l3store.backends.nvme.index import SLOT_BITS
from l3store.backends.nvme.journal import Entry

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from l3store.backends.nvme.catalog import Catalog
    from l3store.backends.nvme.format import Geometry
    from l3store.backends.nvme.members import Members
    from l3store.backends.nvme.segment import Files, Segment
    from l3store.backends.nvme.shelf import Run, Shelf

__all__ = ["Estate"]


class Estate(Growth):
    """What this process owns of a store. Guarded by the store's lock; blocks for small I/O."""

    def __init__(
        self, catalog: Catalog, members: Members, files: Files, *,
        segments: int, writers: int, evict: str, durable: bool,
    ) -> None:  # fmt: skip
        super().__init__(
            catalog, members, files, segments=segments, writers=writers, evict=evict,
            durable=durable,
        )  # fmt: skip
        self.limits: dict[str, int] = {}
        """Most own pages of a place, where somebody has set it."""
        self._syncing = threading.Lock()
        # Generations only ever are compared for being the same one.
        self._generation = int.from_bytes(os.urandom(7), "little")

    def room(self, place: str, geometry: Geometry, count: int, keep: Collection[int]) -> list[Run]:
        """Returns `count` free slots as runs, or as many as can be had.

        First what is free, then new segments and those of dead writers, then what other places do
        not need any more, at last by eviction.

        Args:
            place: Where the pages will be stored.
            geometry: Of a segment of that place.
            count: How many.
            keep: Index values of pages that must not make room for these.

        Raises:
            OSError: The store cannot be written.
            BackendUnavailable: Another process holds a lock for too long.
            ValueError: Another process has just stored pages of another length.
        """
        shelf = self._shelf(place, geometry)
        shelf.used_at = time.monotonic()
        self.writer(place)
        count = self._within_limit(place, shelf, count, keep)
        while shelf.space.free < count and (
            self.shelve_one(place, roomy=True) or self._grow(place, geometry)
        ):
            pass
        if self._evict != "none":
            while count > shelf.space.free and (
                self._take_from_another(place, shelf) or self._evict_some(place, shelf, count, keep)
            ):
                pass
        return shelf.take(count)

    def _within_limit(self, place: str, shelf: Shelf, count: int, keep: Collection[int]) -> int:
        """Makes room below the place's own limit, if it has one; returns what it allows."""
        limit = self.limits.get(place)
        if limit is None:
            return count
        filling = sum(run[2] for runs in self.writing.values() for run in runs if run[0] in shelf)
        over = len(shelf.policy) + filling + count - limit
        if over > 0 and self._evict != "none":
            self._make_room(shelf, over, keep)
        return max(0, min(count, limit - len(shelf.policy) - filling))

    def _evict_some(self, place: str, shelf: Shelf, count: int, keep: Collection[int]) -> bool:
        """Evicts, after a look through one segment of a dead writer.

        A look through all of them takes seconds where they hold a million pages; the keeper comes
        to the rest, and each call to one more.
        """
        looked = self.shelve_one(place)
        short = count - shelf.space.free
        return (short > 0 and self._make_room(shelf, short, keep)) or looked

    def _make_room(self, shelf: Shelf, count: int, keep: Collection[int]) -> bool:
        """Evicts. Returns whether it found pages that may go, if it could remove them or not."""
        busy = shelf.numbers(itertools.chain(keep, *self.reading.values()))
        told: list[Run] = []
        failure: OSError | None = None
        chosen = list(shelf.runs(shelf.policy.evict(count, busy)))
        # Told before, so that nobody believes in a page that is gone when this process is killed in
        # between; and told again afterwards, for those who began in between.
        with suppress(OSError):
            self.tell(journal.DEL, chosen)
        for run in chosen:
            segment, first, length = run
            if segment.failed:
                continue
            try:
                segment.clear(first, length)
            except OSError as error:
                failure = error
                self.fail(segment)
                continue
            self._unsynced.add(segment)
            for slot in range(first, first + length):
                self._catalog.remove(segment, slot)
            told.append(run)
        try:
            self.tell(journal.DEL, told)
        finally:
            for segment, first, length in told:
                shelf.give(segment, range(first, first + length))
        if failure is not None and all(segment.failed for segment in shelf.segments):
            raise failure
        return bool(chosen)

    def why_full(self) -> str:
        """Returns why there was no room, and what to do about it."""
        held = len(self.owned())
        others = len(self._catalog.segments) - held
        if not held and others >= self._total:
            return (
                f"all {self._total} segments belong to other processes; open the store with "
                "writers=N in each of the N processes that write: each is sure of its share then"
            )
        if not held and others < self._total:
            return "the file system has no space for a segment"
        return f"no room in the {held} segments of this process"

    def sync_cleared(self, segments: Collection[Segment]) -> None:
        """Makes the clearing of records survive a power cut, before their slots are filled."""
        with self._syncing:  # who finds nothing to do must not go on before it is done
            for segment in self._unsynced.intersection(segments):
                self._unsynced.discard(segment)
                try:
                    segment.sync()
                except BaseException:
                    self._unsynced.add(segment)
                    raise

    def generation(self) -> int:
        """Returns a number that makes generations which no slot had before: add the slot's."""
        self._generation += 1 << SLOT_BITS
        return self._generation

    def publish(
        self,
        place: str,
        runs: Sequence[Run],
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        generation: int,
    ) -> None:
        """Pages of one place are stored.

        Args:
            place: Theirs.
            runs: Where they lie, in order of the chain.
            hashes: Their hashes.
            parents: The hash of the page before each.
            generation: As it was given for them.

        Raises:
            OSError: A journal cannot be written; none of them counts as stored.
        """
        self.tell(journal.PUT, runs, generation)
        shelf, index = self.shelves[place], self._catalog.places[place].pages
        numbers: list[int] = []
        for segment, first, count in runs:
            start = shelf.number(segment, first)
            numbers += range(start, start + count)
        here = dict(zip(hashes, numbers, strict=True))
        before = [
            here[parent] if parent in here else shelf.parent(index.get(parent))
            for parent in parents
        ]
        surplus = []
        values = iter(hashes)
        for segment, first, count in runs:
            for slot, value in zip(range(first, first + count), values, strict=False):
                if value in index:
                    surplus.append((segment, slot))  # another thread was first
                self._catalog.add(segment, slot, value)
        shelf.policy.added(numbers, before)
        for segment, slot in surplus:
            with suppress(OSError):  # then it stays, as a second copy
                self.remove(segment, slot, None)

    def put_back(self, segment: Segment, slots: Sequence[int]) -> None:
        """Slots that were taken were not filled, or nobody could be told."""
        shelf = self._holder(segment)
        if shelf is None:
            return
        try:
            for slot in slots:
                segment.clear(slot, 1)
        except OSError:
            self.fail(segment)
        self._unsynced.add(segment)
        shelf.give(segment, slots)

    def remove(self, segment: Segment, slot: int, record: bytes | None) -> bool:
        """Removes the page in a slot, of whosever segment, if its record still is `record`.

        Raises:
            OSError: The store cannot be written.
        """
        if record is None:
            record = segment.read_records(slot, 1)
        if record == DEAD:  # its owner may be filling it: hands off
            self._forget(segment, slot)
            return False
        writer = self._members.mine.get(segment.block.writer) or self.writer()
        generation = int.from_bytes(record[128:136], "little")
        drop = Entry(journal.DROP, segment.number, slot, 1, generation)
        writer.journal.append([drop])  # before and afterwards, as for an eviction
        try:
            if not segment.clear_if(slot, record) and segment.read_records(slot, 1) != DEAD:
                return False
        except OSError:
            if self.owns(segment):
                self.fail(segment)  # the page is there after all, and all hear of it again
            else:
                self._forget(segment, slot)  # its owner removes it, now that it was told
            raise
        self._forget(segment, slot)
        writer.journal.append([drop])
        return True

    def _forget(self, segment: Segment, slot: int) -> None:
        if self._catalog.remove(segment, slot):  # or its slot is free already, or being filled
            self.gone(segment, [slot])
