"""One segment file: its records, its slots, and how both are read, written and cleared."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from l3store.backends._vectors import IOV_MAX, move_all
from l3store.backends.nvme.bounce import bounced_read, bounced_write
from l3store.backends.nvme.format import DEAD, RECORD_BYTES, SUPERBLOCK_BYTES, Superblock
from l3store.backends.nvme.locks import held
from l3store.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

__all__ = ["Files", "Segment", "segment_name"]

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_HANDLES = 512
_LOCK_SECONDS = 1.0


def segment_name(number: int) -> str:
    """Returns the file name of a segment."""
    return f"seg-{number:06d}"


class _Handle:
    """A descriptor that is closed when the last one who uses it lets go."""

    __slots__ = ("file",)

    def __init__(self, file: int) -> None:
        self.file = file

    def __del__(self) -> None:
        os.close(self.file)


class Files:
    """The segment files of one folder: opens them when needed, keeps the most recent open.

    Thread-safe. A descriptor stays open as long as a call uses it.
    """

    def __init__(self, folder: int, *, writable: bool, direct: bool) -> None:
        self.folder = folder
        self.direct = direct
        """Whether slots are moved past the page cache."""
        self._access = os.O_RDWR if writable else os.O_RDONLY
        self._open: OrderedDict[tuple[int, bytes, bool], _Handle] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, segment: Segment, *, data: bool) -> _Handle:
        """Returns a handle for slots (`data`) or for records.

        Raises:
            OSError: It cannot be opened, or another segment has its number now (ENOENT).
        """
        key = (segment.number, segment.identity, data and self.direct)
        with self._lock:
            handle = self._open.get(key)
            if handle is not None:
                self._open.move_to_end(key)
                return handle
            handle = _Handle(self._opened(segment, direct=key[2]))
            self._open[key] = handle
            if len(self._open) > _HANDLES:
                self._open.popitem(last=False)
            return handle

    def _opened(self, segment: Segment, *, direct: bool) -> int:
        name, flags = segment_name(segment.number), self._access | _OPEN
        file = os.open(name, flags, dir_fd=self.folder)
        try:
            block = Superblock.parse(
                os.pread(file, SUPERBLOCK_BYTES, 0), segment.number, segment.geometry.segment_bytes
            )
            if block.identity != segment.identity:
                raise OSError(errno.ENOENT, f"{name} is another segment now")
            if not direct:
                return file
            slots = os.open(name, flags | os.O_DIRECT, dir_fd=self.folder)
        except IntegrityError as error:
            os.close(file)
            raise OSError(errno.ENOENT, str(error)) from error
        except BaseException:
            os.close(file)
            raise
        same = os.path.sameopenfile(file, slots)  # it may have been made anew in between
        os.close(file)
        if not same:
            os.close(slots)
            raise OSError(errno.ENOENT, f"{name} is another segment now")
        return slots

    def forget(self, segment: Segment) -> None:
        """Closes a segment's files once nobody uses them."""
        with self._lock:
            for direct in (False, True):
                self._open.pop((segment.number, segment.identity, direct), None)

    def close(self) -> None:
        """Closes all files that nobody uses."""
        with self._lock:
            self._open.clear()


class Segment:
    """A segment as this process knows it.

    `pages[slot]` is the page hash that lives in a slot, None where none does; it is guarded by the
    store's lock, as are `unproved` (slots whose bytes may not be what their record says, since the
    machine went down) and `failed` (the drive refused a write: nothing new goes here).
    """

    __slots__ = (
        "_files", "_named", "block", "failed", "geometry", "identity", "needs_sync", "number",
        "pages", "place", "unproved",
    )  # fmt: skip

    def __init__(self, block: Superblock, files: Files) -> None:
        self.block = block
        self.number, self.place, self.identity = block.number, block.place, block.identity
        self.geometry = block.geometry
        self.pages: list[bytes | None] = [None] * block.geometry.slots
        self.unproved: set[int] = set()
        self.failed = False
        self.needs_sync = False
        """Something was written that no sync has covered."""
        self._named = False  # a sync of the folder has covered its name
        self._files = files

    @property
    def tag(self) -> int:
        """What its writer calls it when it is given up: a part of its identity."""
        return int.from_bytes(self.identity[:8], "little")

    # -- records: through the page cache, which all processes share -------------------------

    def read_records(self, first: int, count: int) -> bytes:
        """Returns the records of `count` slots; zeros where the file is cut short."""
        handle = self._files.get(self, data=False)
        size = count * RECORD_BYTES
        data = os.pread(handle.file, size, SUPERBLOCK_BYTES + first * RECORD_BYTES)
        return data if len(data) == size else data.ljust(size, b"\0")

    def write_records(self, first: int, data: bytes) -> None:
        """Writes the records of neighbouring slots in one call."""
        handle = self._files.get(self, data=False)
        at = SUPERBLOCK_BYTES + first * RECORD_BYTES
        try:
            written = os.pwrite(handle.file, data, at)
        finally:
            self.needs_sync = True
        if written != len(data):
            raise OSError(errno.ENOSPC, "the file system took only part of a record")

    def clear(self, first: int, count: int) -> None:
        """Frees slots, as their owner: whoever may be clearing one of them is waited for."""
        with self._locked(first, count):
            self.write_records(first, DEAD * count)

    def clear_if(self, slot: int, record: bytes) -> bool:
        """Frees a slot whose record still is `record`, also of a segment of somebody else.

        The lock keeps the owner from freeing and filling the slot between look and write.
        """
        with self._locked(slot, 1):
            if self.read_records(slot, 1) != record:
                return False
            self.write_records(slot, DEAD)
            return True

    def _locked(self, first: int, count: int) -> AbstractContextManager[None]:
        handle = self._files.get(self, data=False)
        at, size = SUPERBLOCK_BYTES + first * RECORD_BYTES, count * RECORD_BYTES
        return held(
            lambda: _range_locked(handle.file, at, size),
            lambda: fcntl.fcntl(handle.file, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, at, size)),
            _LOCK_SECONDS,
            f"{segment_name(self.number)}: another process holds a record's lock",
        )

    # -- slots -------------------------------------------------------------------------------

    def read_slots(self, first: int, pages: Sequence[Sequence[memoryview]]) -> bool:
        """Reads neighbouring slots into payload pieces; false when the file is too short."""
        try:
            return self._move(os.preadv, first, pages, _trash, bounced_read)
        except OSError as error:
            # A file system that turned read-only cannot flush what a direct read must see first.
            if error.errno != errno.EROFS or not self._files.direct:
                raise
        return self._move(os.preadv, first, pages, _trash, bounced_read, data=False)

    def write_slots(self, first: int, pages: Sequence[Sequence[memoryview]]) -> bool:
        """Writes payload pieces into neighbouring slots; false when not all was taken."""
        try:
            return self._move(os.pwritev, first, pages, _zeros, bounced_write)
        finally:
            self.needs_sync = True  # not before: a sync under way may have missed it

    def _move(
        self,
        move: Callable[[int, Sequence[memoryview], int], int],
        first: int,
        pages: Sequence[Sequence[memoryview]],
        padding: memoryview,
        bounced: Callable[[int, Sequence[memoryview], int], int],
        *,
        data: bool = True,
    ) -> bool:
        handle, geometry = self._files.get(self, data=data), self.geometry
        slot, gap = geometry.slot_bytes, geometry.slot_bytes - geometry.payload_bytes
        filler = (padding[:gap],) if gap else ()
        at_once = max(1, IOV_MAX // (len(pages[0]) + 1))
        for start in range(0, len(pages), at_once):
            part = pages[start : start + at_once]
            pieces = [piece for page in part for piece in (*page, *filler)]
            offset, wanted = geometry.data_offset + (first + start) * slot, slot * len(part)
            try:
                moved = move(handle.file, pieces, offset) if len(pieces) <= IOV_MAX else 0
                if moved != wanted:  # from the beginning: it is rare
                    moved = move_all(move, handle.file, pieces, offset)
            except OSError as error:
                # Unaligned memory is refused before a byte moves; to ask first would cost more.
                if error.errno != errno.EINVAL or not self._files.direct:
                    raise
                moved = bounced(handle.file, pieces, offset)
            if moved != wanted:
                return False
        return True

    def sync(self) -> None:
        """Makes what was written survive a power cut; blocks for the drive."""
        self.needs_sync = False
        try:
            os.fdatasync(self._files.get(self, data=False).file)
            if not self._named:
                os.fsync(self._files.folder)
                self._named = True
        except BaseException:
            self.needs_sync = True
            raise

    def put_superblock(self, block: Superblock) -> None:
        """Replaces the superblock, and makes that survive a power cut."""
        handle = self._files.get(self, data=False)
        os.pwrite(handle.file, block.pack(), 0)
        os.fdatasync(handle.file)
        self.block = block


_zeros = memoryview(mmap.mmap(-1, 4096)).toreadonly()
_trash = memoryview(mmap.mmap(-1, 4096))


def _range_locked(file: int, start: int, length: int) -> bool:
    """Locks bytes of a file if nobody has them locked."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, start, length))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _flock(kind: int, start: int, length: int) -> bytes:
    """A `struct flock` of fcntl(2), as 64-bit Linux lays it out."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)
