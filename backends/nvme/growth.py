"""How segments come to this process, and how it gives them up."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from l3store.backends._folder_backend import FULL
from l3store.backends.nvme import journal
from l3store.backends.nvme.catalog import segment_numbers
from l3store.backends.nvme.format import Superblock, histories
from l3store.backends.nvme.holdings import Holdings
from l3store.backends.nvme.journal import Entry
from l3store.backends.nvme.segment import segment_name
from l3store.backends.nvme.shelf import IDLE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.backends.nvme.catalog import Catalog
    from l3store.backends.nvme.format import Geometry
    from l3store.backends.nvme.members import Members, Writer
    from l3store.backends.nvme.segment import Files, Segment
    from l3store.backends.nvme.shelf import Shelf

__all__ = ["Growth"]

_GROW_AGAIN_SECONDS = 10.0
_TRY_AGAIN_SECONDS = 10.0
_LOOKED_AFTER = 64  # segments a second
_libc = ctypes.CDLL(None, use_errno=True)


class Growth(Holdings):
    """Makes segments, takes over those of dead writers, moves them from place to place.

    Guarded by the store's lock; blocks for small I/O.
    """

    def __init__(
        self, catalog: Catalog, members: Members, files: Files, *,
        segments: int, writers: int, evict: str, durable: bool,
    ) -> None:  # fmt: skip
        super().__init__(catalog, members, evict)
        catalog.on_read_again = self._read_again
        self._files = files
        self._total, self._writers, self._durable = segments, writers, durable
        self.guaranteed = max(1, segments // writers)
        """Segments that this process is sure of."""
        self._grow_at = 0.0
        self._unshelved: list[Segment] = []  # of dead writers: ours, and not looked through yet
        self._failed: dict[Segment, float] = {}  # the drive refused a write; when to try again
        self._looked_at = 0  # segments that were looked after, of the own ones in turn

    def writer(self, place: str | None = None) -> Writer:
        """Returns the writer of this process, which takes or makes one when it has none.

        Args:
            place: Of the writers whose process is gone take the one with the most segments of it.
                None: one without segments. Who only has something to tell must not keep room from
                those who store pages.

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
                if place is None:
                    counts.pop(segment.block.writer, None)
                elif segment.block.writer in counts and segment.place == place:
                    counts[segment.block.writer] += 1
            if counts:
                self._adopt(max(counts, key=counts.__getitem__))
            if not self._members.mine:
                self._members.make()
        return next(iter(self._members.mine.values()))

    def _orphans(self) -> list[bytes]:
        return self._members.orphans(one.block.writer for one in self._catalog.segments.values())

    def _adopt(self, identity: bytes) -> bool:
        """Takes over a writer whose process is gone, inside the store's lock."""
        numbers = segment_numbers(self._files.folder)  # or nothing, if even that fails
        writer = self._members.take(identity)
        if writer is None:
            return False
        for number in numbers:
            segment = self._catalog.meet(number)
            if segment is None or segment.block.writer != identity:
                continue
            if number >= self._total:  # the store was made smaller
                with suppress(OSError):
                    self._close(segment)
            else:
                self._unshelved.append(segment)
        return True

    def _read_again(self, segment: Segment) -> None:
        """An own segment could not be read, perhaps not even when its writer was taken over."""
        if not (self.settled(segment) or segment in (*self._unshelved, *self._failed)):
            self._unshelved.append(segment)

    def shelve_one(self, place: str | None = None, *, roomy: bool = False) -> bool:
        """Looks through one segment of a dead writer and makes it ours in full, 4 us a page.

        Also one that the drive refused to write a while ago.

        Args:
            place: Of this place if there is one.
            roomy: Only one of this place that has free slots, or one without pages, as far as is
                known.

        Returns:
            Whether there was one.
        """
        self._try_again()
        if not self._unshelved:
            return False
        here = [segment for segment in self._unshelved if segment.place == place]
        if roomy:
            here = [segment for segment in here if None in segment.pages]
            here = here or [one for one in self._unshelved if not any(one.pages)]
            if not here:
                return False
        segment = (here or self._unshelved)[0]
        self._unshelved.remove(segment)
        if self._catalog.segments.get(segment.number) is not segment:
            return True
        try:
            self._catalog.load(segment)
            if segment.block.durable and not self._durable:
                segment.put_superblock(replace(segment.block, durable=False))
            self._unsynced.add(segment)  # whatever its writer cleared last
            handle, size = self._files.get(segment, data=False), segment.geometry.segment_bytes
            if os.fstat(handle.file).st_size < size:  # a power cut came before its space was safe
                _allocate(handle.file, segment_name(segment.number), size)
            self._shelve(segment, segment.read_records(0, segment.geometry.slots))
            self.tell(journal.LOAD, [(segment, 0, 1)])
        except OSError:  # it stays readable as far as it is
            self._failed[segment] = time.monotonic() + _TRY_AGAIN_SECONDS
        return True

    def settled(self, segment: Segment) -> bool:
        """Returns whether a segment is ours, and all that is in it is known."""
        return self._holder(segment) is not None

    def _shelve(self, segment: Segment, table: bytes) -> None:
        shelf = self._shelf(segment.place, segment.geometry)
        shelf.add(segment)
        index = self._catalog.places[segment.place].pages
        first, now = shelf.number(segment, 0), time.time_ns()
        # When they were written is the best guess at when they were used.
        known = [
            (first + slot, shelf.parent(index.get(parent)), (now - created) / 1e9)
            for slot, (parent, created) in enumerate(histories(table))
            if segment.pages[slot] is not None
        ]
        if known:
            shelf.policy.added(*map(list, zip(*known, strict=True)))

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
            number = next((n for n in numbers if self._catalog.is_dead(n)), -1)
            if number < 0:  # what was none a moment ago cannot be read now
                return False
            os.unlink(segment_name(number), dir_fd=self._files.folder)
        block = Superblock(
            number, place, geometry, writer.identity, self._catalog.boot, os.urandom(16),
            self._durable,
        )  # fmt: skip
        try:
            make_segment(self._files.folder, block)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._grow_at = time.monotonic() + _GROW_AGAIN_SECONDS
            return False
        self._shelf(place, geometry).add(self._catalog.install(block))
        writer.journal.append([Entry(journal.OPEN, number)])
        return True

    def _take_from_another(self, place: str, shelf: Shelf) -> bool:
        """Gives up a segment of a place that needs it less, and makes one of this place of it.

        Less: no page in it; or unused for long; or this place has none; or the other has more slots
        even afterwards, so that pools of one chain come to hold equally many pages.
        """
        mine, now = len(shelf.segments) * shelf.geometry.slots, time.monotonic()
        others = [
            (name, other)
            for name, other in self.shelves.items()
            if other is not shelf and self._movable(other)
        ]
        empty = [other for _, other in others if other.space.longest == other.geometry.slots]
        idle = [one for one in others if now - one[1].used_at > IDLE_SECONDS]
        if empty:
            other = empty[0]
        elif idle:
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
            self._catalog.refresh()
            self._catalog.check_lengths({place: shelf.geometry.payload_bytes})
            if self._holder(victim) is None:  # somebody removed it by hand
                return True
            self._close(victim)
            numbers = [n for n in segment_numbers(self._files.folder) if n < self._total]
            return self._create(self.writer(place), place, shelf.geometry, numbers)

    def _movable(self, shelf: Shelf) -> list[Segment]:
        busy = self._busy()
        return [segment for segment in shelf.segments if segment not in busy]

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
        try:
            os.unlink(segment_name(segment.number), dir_fd=self._files.folder)
        except OSError:
            self.fail(segment)  # it is there after all: looked through later, all hear of it again
            raise
        self._catalog.drop(segment)

    def _tell_closed(self, segment: Segment) -> None:
        self._members.mine[segment.block.writer].journal.append(
            [Entry(journal.CLOSE, segment.number, generation=segment.tag)]
        )

    def fail(self, segment: Segment) -> None:
        """The drive refused a write: nothing new goes into a segment for a while."""
        shelf = self._holder(segment)
        if shelf is not None:
            shelf.fail(segment)
            self._failed[segment] = time.monotonic() + _TRY_AGAIN_SECONDS

    def _try_again(self) -> None:
        """Takes segments that failed a while ago off their shelves, to be looked through anew."""
        now = time.monotonic()
        for segment in [one for one, at in self._failed.items() if at <= now]:
            if segment in self._busy():
                continue
            del self._failed[segment]
            shelf = self._holder(segment)
            if shelf is not None:
                shelf.drop(segment)
            segment.failed = False
            self._unshelved.append(segment)


def make_segment(folder: int, block: Superblock) -> None:
    """Makes a segment's file with all its space: O_EXCL, so no number is ever taken twice.

    Raises:
        OSError: No space; nothing is left behind.
    """
    name, size = segment_name(block.number), block.geometry.segment_bytes
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        _allocate(file, name, size)
        os.pwrite(file, block.pack(), 0)
        if block.durable:
            os.fsync(file)
            os.fsync(folder)
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(file)


def _allocate(file: int, name: str, size: int) -> None:
    """Gives a file all its space; what is in it stays."""
    # glibc's posix_fallocate would fill the file with zeros where the file system cannot.
    if _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code != errno.EOPNOTSUPP:
            raise OSError(code, os.strerror(code), name)
        found = os.fstatvfs(file)
        if found.f_blocks and found.f_bavail * found.f_frsize < size:  # ramfs has no blocks
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        os.ftruncate(file, size)
