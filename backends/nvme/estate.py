"""Room for pages: makes segments, takes over those of dead writers, evicts, frees slots."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from l3store.backends.nvme import journal
from l3store.backends.nvme.catalog import SLOT_BITS, segment_numbers
from l3store.backends.nvme.eviction import NONE, POLICIES, LeafLRU
from l3store.backends.nvme.format import Geometry, Superblock, histories
from l3store.backends.nvme.journal import Entry
from l3store.backends.nvme.segment import segment_name
from l3store.backends.nvme.shelf import IDLE_SECONDS, Shelf

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from l3store.backends.nvme.catalog import Catalog
    from l3store.backends.nvme.members import Members, Writer
    from l3store.backends.nvme.segment import Files, Segment
    from l3store.backends.nvme.shelf import Run

__all__ = ["Estate"]

_GROW_AGAIN_SECONDS = 10.0
_TRY_AGAIN_SECONDS = 10.0
_LOOKED_AFTER = 64  # segments a second
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_libc = ctypes.CDLL(None, use_errno=True)


class Estate:
    """What this process owns of a store. Guarded by the store's lock; blocks for small I/O."""

    def __init__(
        self,
        catalog: Catalog,
        members: Members,
        files: Files,
        *,
        segments: int,
        writers: int,
        evict: str,
        durable: bool,
    ) -> None:
        self.shelves: dict[str, Shelf] = {}
        self.reading: dict[object, Collection[int]] = {}
        """Index values of the slots that a running call of this process reads."""
        self.writing: dict[object, Sequence[Run]] = {}
        """Slots that a running call of this process fills."""
        self.retired: list[tuple[Segment, int]] = []
        """Slots without a page that somebody still reads; free afterwards."""
        self._catalog, self._members, self._files = catalog, members, files
        self._total, self._evict, self._durable = segments, evict, durable
        self.guaranteed = max(1, segments // writers)
        """Segments that this process is sure of."""
        self.limits: dict[str, int] = {}
        """Most own pages of a place, where somebody has set it."""
        self._writers = writers
        self._grow_at = 0.0
        self._unshelved: list[Segment] = []  # of dead writers: ours, and not looked through yet
        self._failed: dict[Segment, float] = {}  # the drive refused a write; when to try again
        self._looked_at = 0  # segments that were looked after, of the own ones in turn
        self._unsynced: set[Segment] = set()  # cleared records that no sync has covered
        # Generations only ever are compared for being the same one.
        self._generation = int.from_bytes(os.urandom(7), "little")
        catalog.on_gone, catalog.on_touch = self.gone, self._touched

    # -- what is ours ------------------------------------------------------------------------

    def owns(self, segment: Segment) -> bool:
        """Returns whether this process is the writer of a segment."""
        return segment.block.writer in self._members.mine

    def owned(self) -> list[Segment]:
        """Returns all own segments."""
        return [segment for segment in self._catalog.segments.values() if self.owns(segment)]

    def writer(self, place: str) -> Writer:
        """Returns the writer of this process, which takes or makes one when it has none.

        Of those whose process is gone the one with the most segments of `place`.

        Raises:
            OSError: No space, or the store cannot be written.
            BackendUnavailable: Another process holds the store's lock for too long.
        """
        for writer in self._members.mine.values():
            return writer
        with self._members.locked():
            self._catalog.refresh()
            counts = dict.fromkeys(self._orphans(), 0)
            for segment in self._catalog.segments.values():
                if segment.block.writer in counts and segment.place == place:
                    counts[segment.block.writer] += 1
            if counts:
                self._adopt(max(counts, key=counts.__getitem__))
            if not self._members.mine:
                self._members.make()
        return next(iter(self._members.mine.values()))

    def _orphans(self) -> list[bytes]:
        segments = self._catalog.segments.values()
        before = (one.block.writer for one in segments if one.block.boot != self._catalog.boot)
        return self._members.orphans(before)

    def _adopt(self, identity: bytes) -> bool:
        """Takes over a writer whose process is gone, inside the store's lock."""
        writer = self._members.take(identity)
        if writer is None:
            return False
        for number in segment_numbers(self._files.folder):
            segment = self._catalog.meet(number)
            if segment is None or segment.block.writer != identity:
                continue
            if number >= self._total:  # the store was made smaller
                self._close(segment)
            else:
                self._unshelved.append(segment)
        return True

    def shelve_one(self, place: str | None = None) -> bool:
        """Looks through one segment of a dead writer and makes it ours in full, 4 us a page.

        Also one that the drive refused to write a while ago.

        Args:
            place: Of this place if there is one.

        Returns:
            Whether there was one.
        """
        self._try_again()
        if not self._unshelved:
            return False
        here = [segment for segment in self._unshelved if segment.place == place]
        segment = (here or self._unshelved)[0]
        self._unshelved.remove(segment)
        if self._catalog.segments.get(segment.number) is not segment:
            return True
        try:
            self._catalog.load(segment)
            if segment.block.durable and not self._durable:
                segment.put_superblock(replace(segment.block, durable=False))
            self._shelve(segment, segment.read_records(0, segment.geometry.slots))
        except OSError:  # it stays readable as far as it is
            self._failed[segment] = time.monotonic() + _TRY_AGAIN_SECONDS
        return True

    def _shelve(self, segment: Segment, table: bytes) -> None:
        shelf = self._shelf(segment.place, segment.geometry)
        shelf.add(segment)
        index = self._catalog.places[segment.place].pages
        # The order in which they were written is the best guess at the order of their use.
        known = sorted(
            (created, depth, slot, parent)
            for slot, (parent, depth, created) in enumerate(histories(table))
            if segment.pages[slot] is not None
        )
        slots = [shelf.number(segment, slot) for _, _, slot, _ in known]
        parents = [self._parent(shelf, index.get(parent)) for _, _, _, parent in known]
        shelf.policy.added(slots, parents)

    def _shelf(self, place: str, geometry: Geometry) -> Shelf:
        shelf = self.shelves.get(place)
        if shelf is None:
            shelf = self.shelves[place] = Shelf(geometry, POLICIES.get(self._evict, LeafLRU)())
        return shelf

    @staticmethod
    def _parent(shelf: Shelf, location: int | None) -> int:
        return NONE if location is None else next(iter(shelf.numbers((location,))), NONE)

    # -- room --------------------------------------------------------------------------------

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
        while shelf.space.free < count and self.shelve_one(place):
            pass
        while shelf.space.free < count and self._grow(place, geometry):
            while shelf.space.free < count and self.shelve_one(place):
                pass
        if shelf.space.free < count and self._evict != "none":
            while shelf.space.free < count and self._take_from_another(place, shelf):
                pass
            while (short := count - shelf.space.free) > 0 and self._make_room(shelf, short, keep):
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

    def _make_room(self, shelf: Shelf, count: int, keep: Collection[int]) -> bool:
        """Evicts. Returns whether it found pages that may go, if it could remove them or not."""
        busy = shelf.numbers(itertools.chain(keep, *self.reading.values()))
        told: list[Run] = []
        failure: OSError | None = None
        chosen = list(shelf.runs(shelf.policy.evict(count, busy)))
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

    def sync_cleared(self, segments: Collection[Segment]) -> None:
        """Makes the clearing of records survive a power cut, before their slots are filled."""
        for segment in self._unsynced.intersection(segments):
            segment.sync()
            self._unsynced.discard(segment)

    # -- segments ----------------------------------------------------------------------------

    def _grow(self, place: str, geometry: Geometry) -> bool:
        """Adds a segment, or a dead writer with all of its own. Returns whether it did."""
        if time.monotonic() < self._grow_at:
            return False
        writer = self.writer(place)
        with self._members.locked():
            self._catalog.refresh()
            self._catalog.check_lengths({place: geometry.payload_bytes})
            numbers = [n for n in segment_numbers(self._files.folder) if n < self._total]
            free = self._total - len(numbers)
            orphans = self._orphans()
            counts: dict[bytes, int] = dict.fromkeys((*self._members.peers, *orphans), 0)
            for number in numbers:
                block = self._catalog.superblock(number)
                if block is not None:
                    if block.writer in counts:
                        counts[block.writer] += 1
                elif self._catalog.is_dead(number):  # nobody is making it now: damaged
                    free += 1
            spare = free + sum(counts[one] for one in orphans)
            if len(self.owned()) >= self.guaranteed:
                alive = [counts[one] for one in self._members.peers if one not in orphans]
                spare -= sum(max(0, self.guaranteed - count) for count in alive)
                spare -= self.guaranteed * max(0, self._writers - 1 - len(alive))
            if spare > 0 and free:
                return self._create(writer, place, geometry, numbers)
            for identity in orphans:
                if 0 < counts[identity] <= spare and self._adopt(identity):
                    return True
        # Others may give something back, but to ask at every call would cost more than it brings.
        self._grow_at = time.monotonic() + _GROW_AGAIN_SECONDS
        return False

    def _create(
        self, writer: Writer, place: str, geometry: Geometry, numbers: Sequence[int]
    ) -> bool:
        taken = set(numbers)
        number = next((n for n in range(self._total) if n not in taken), -1)
        if number < 0:
            number = next(n for n in numbers if self._catalog.is_dead(n))
            os.unlink(segment_name(number), dir_fd=self._files.folder)
        block = Superblock(
            number, place, geometry, writer.identity, self._catalog.boot, os.urandom(16),
            self._durable,
        )  # fmt: skip
        try:
            make_segment(self._files.folder, block)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._grow_at = time.monotonic() + _GROW_AGAIN_SECONDS
            return False
        self._shelf(place, geometry).add(self._catalog.install(block))
        writer.journal.append([Entry(journal.OPEN, number)])
        return True

    def _take_from_another(self, place: str, shelf: Shelf) -> bool:
        """Gives up a segment of a place that needs it less, and makes one of this place of it.

        Less: unused for long; or this place has none; or the other has more slots even afterwards,
        so that pools of one chain come to hold equally many pages.
        """
        mine, now = len(shelf.segments) * shelf.geometry.slots, time.monotonic()
        others = [
            (name, other)
            for name, other in self.shelves.items()
            if other is not shelf and self._movable(other)
        ]
        idle = [one for one in others if now - one[1].used_at > IDLE_SECONDS]
        if idle:
            other = min(idle, key=lambda one: one[1].used_at)[1]
        elif others:
            other = max(others, key=lambda one: len(one[1].segments) * one[1].geometry.slots)[1]
            theirs = (len(other.segments) - 1) * other.geometry.slots
            if shelf.segments and theirs < mine + shelf.geometry.slots:
                return False
        else:
            return False
        victim = min(self._movable(other), key=lambda one: sum(map(bool, one.pages)))
        with self._members.locked():
            self._close(victim)
            numbers = [n for n in segment_numbers(self._files.folder) if n < self._total]
            return self._create(self.writer(place), place, shelf.geometry, numbers)

    def _movable(self, shelf: Shelf) -> list[Segment]:
        busy = self._busy()
        return [segment for segment in shelf.segments if segment not in busy]

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

    def look_after(self) -> None:
        """Forgets own segments whose files were damaged or removed; a few a call, in turn.

        What is stored in them from now on nobody else would find.

        Raises:
            OSError: A journal cannot be written.
        """
        owned, start = self.owned(), self._looked_at
        self._looked_at = start + _LOOKED_AFTER if start + _LOOKED_AFTER < len(owned) else 0
        for segment in owned[start : start + _LOOKED_AFTER]:
            if self._catalog.is_dead(segment.number, segment.identity):
                if segment in self._busy():
                    continue  # the next time
                self._tell_closed(segment)
                self._catalog.drop(segment)

    def _close(self, segment: Segment) -> None:
        """Gives an own segment up, with all that is in it."""
        self._tell_closed(segment)
        os.unlink(segment_name(segment.number), dir_fd=self._files.folder)
        self._catalog.drop(segment)

    def _tell_closed(self, segment: Segment) -> None:
        self._members.mine[segment.block.writer].journal.append(
            [Entry(journal.CLOSE, segment.number, generation=segment.tag)]
        )

    # -- pages come and go -------------------------------------------------------------------

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
        """  # fmt: skip
        self.tell(journal.PUT, runs, generation)
        shelf, index = self.shelves[place], self._catalog.places[place].pages
        numbers: list[int] = []
        for segment, first, count in runs:
            start = shelf.number(segment, first)
            numbers += range(start, start + count)
        here = dict(zip(hashes, numbers, strict=True))
        before = [
            here[parent] if parent in here else self._parent(shelf, index.get(parent))
            for parent in parents
        ]
        surplus = []
        values = iter(hashes)
        for segment, first, count in runs:
            for slot, value in zip(range(first, first + count), values, strict=False):
                if value in index:
                    surplus.append((segment, slot))  # another thread was first
                else:
                    self._catalog.add(segment, slot, value)
        shelf.policy.added(numbers, before)
        for segment, slot in surplus:
            self.remove(segment, slot, None)

    def fail(self, segment: Segment) -> None:
        """The drive refused a write: nothing new goes into a segment for a while."""
        shelf = self.shelves.get(segment.place)
        if shelf is not None and segment in shelf:
            shelf.fail(segment)
            self._failed[segment] = time.monotonic() + _TRY_AGAIN_SECONDS

    def _try_again(self) -> None:
        """Takes segments that failed a while ago off their shelves, to be looked through anew."""
        now = time.monotonic()
        for segment in [one for one, at in self._failed.items() if at <= now]:
            if segment in self._busy():
                continue
            del self._failed[segment]
            shelf = self.shelves.get(segment.place)
            if shelf is not None and segment in shelf:
                shelf.drop(segment)
            segment.failed = False
            self._unshelved.append(segment)

    def put_back(self, segment: Segment, slots: Sequence[int]) -> None:
        """Slots that were taken were not filled, or nobody could be told."""
        shelf = self.shelves.get(segment.place)
        if shelf is None or segment not in shelf:
            return
        try:
            for slot in slots:
                segment.clear(slot, 1)
        except OSError:
            self.fail(segment)
        shelf.give(segment, slots)

    def remove(self, segment: Segment, slot: int, record: bytes | None) -> bool:
        """Removes the page in a slot, of whosever segment, if its record still is `record`.

        Raises:
            OSError: The store cannot be written.
        """
        if record is None:
            record = segment.read_records(slot, 1)
        if not segment.clear_if(slot, record):
            return False
        generation = int.from_bytes(record[128:136], "little")
        writer = self._members.mine.get(segment.block.writer) or self.writer(segment.place)
        writer.journal.append([Entry(journal.DROP, segment.number, slot, 1, generation)])
        self._catalog.remove(segment, slot)
        self.gone(segment, [slot])
        return True

    def gone(self, segment: Segment, slots: Sequence[int]) -> None:
        """The pages in these slots are gone, and not by eviction: their slots become free."""
        shelf = self.shelves.get(segment.place)
        if shelf is None or segment not in shelf:
            return
        if self._catalog.segments.get(segment.number) is not segment:
            shelf.drop(segment)
            return
        shelf.policy.removed([shelf.number(segment, slot) for slot in slots])
        self.retired += [(segment, slot) for slot in slots]
        self.free_retired()

    def free_retired(self) -> None:
        """Frees the retired slots that nobody reads any more."""
        if not self.retired:
            return
        reading = {location for locations in self.reading.values() for location in locations}
        kept = []
        for segment, slot in self.retired:
            shelf = self.shelves.get(segment.place)
            if shelf is None or segment not in shelf:
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
        shelf = self.shelves.get(segment.place)
        if shelf is not None and segment in shelf:
            shelf.policy.used([shelf.number(segment, slot) for slot in slots])


def make_segment(folder: int, block: Superblock) -> None:
    """Makes a segment's file with all its space: O_EXCL, so no number is ever taken twice.

    Raises:
        OSError: No space; nothing is left behind.
    """
    name, size = segment_name(block.number), block.geometry.segment_bytes
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        # glibc's posix_fallocate would fill the file with zeros where the file system cannot.
        if _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            code = ctypes.get_errno()
            if code != errno.EOPNOTSUPP:
                raise OSError(code, os.strerror(code), name)
            found = os.fstatvfs(file)
            if found.f_blocks and found.f_bavail * found.f_frsize < size:  # ramfs has no blocks
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            os.ftruncate(file, size)
        os.pwrite(file, block.pack(), 0)
        if block.durable:
            os.fsync(file)
            os.fsync(folder)
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(file)
