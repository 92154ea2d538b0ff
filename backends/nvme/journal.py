"""What a writer tells its peers: a ring of 32-byte entries in one file a writer.

    0     magic, format, entries in the ring
    64    head: how many entries were ever written (u64)
    128   counters of the process that holds the writer, see `COUNTERS` (u64 each)
    4096  the ring: entry number n stands at n % entries

Entry: number u64, kind u8, length u24, segment u32, slot u32, generation u64, check u32 (the low
half of xxh3_64 of the 28 bytes before it). It is about so many neighbours, whose generations
rise by one from slot to slot. Entries are written first, then the head. A reader whose place in the
ring was overwritten reads the writer's slot tables again.

The journal is for processes that run now: after a power cut the slot tables are the truth.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CLOSE", "COUNTERS", "DEL", "DROP", "JOURNAL_BYTES", "LOAD", "OPEN", "PUT", "TOUCH", "Entry",
    "Journal",
]  # fmt: skip

PUT, DEL, DROP, TOUCH, OPEN, CLOSE, LOAD = range(1, 8)
"""A page was stored; removed by its owner; removed by this writer from whosever segment; read; a
segment was made or its superblock written anew; a segment was given up (generation: the first 8
bytes of its identity); a segment's table is to be read again, as its writer was killed before it
could tell all."""

COUNTERS = ("pages_read", "runs_read", "recycled", "damaged")

_RING = 1 << 16
_START = 4096
_HEAD_AT = 64
_COUNTERS_AT = 128
_MAGIC = b"L3JOURNL"

_file = Struct("<8sII")
_head = Struct("<Q")
_body = Struct("<QIIIQ")
_entry = Struct("<QIIIQI")
_counters = Struct(f"<{len(COUNTERS)}Q")
JOURNAL_BYTES = _START + _RING * _entry.size


class Entry(NamedTuple):
    """One thing that happened, to a segment or to neighbouring slots of it."""

    kind: int
    segment: int
    slot: int = 0
    """The first."""
    length: int = 1
    generation: int = 0
    """Of the first slot."""


class Journal:
    """One writer's journal, open for appending (by the process that holds it) or for tailing.

    Not thread-safe: the store's lock is held. Blocks for one or two small system calls.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self.seen = 0
        """Entries that were read, or written, here."""

    def make(self, head: int = 0) -> None:
        """Makes the file a journal whose entries up to `head` are lost.

        Raises:
            OSError: No space.
        """
        os.ftruncate(self._file, 0)
        os.posix_fallocate(self._file, 0, JOURNAL_BYTES)
        os.pwrite(self._file, _head.pack(head), _HEAD_AT)
        os.pwrite(self._file, _file.pack(_MAGIC, 1, _RING), 0)

    def whole(self) -> bool:
        """Returns whether the file is a journal of this format."""
        return os.pread(self._file, _file.size, 0) == _file.pack(_MAGIC, 1, _RING)

    def head(self) -> int:
        """Returns how many entries were ever written."""
        data = os.pread(self._file, _head.size, _HEAD_AT)
        return int(_head.unpack(data)[0]) if len(data) == _head.size else 0

    def append(self, entries: Sequence[Entry]) -> None:
        """Writes entries and then tells of them.

        Raises:
            OSError: As the system says; nothing was told.
        """
        first, pack = self.seen, _body.pack
        packed = []
        for number, (kind, segment, slot, length, generation) in enumerate(entries, first):
            body = pack(number, kind | length << 8, segment, slot, generation)
            packed.append(body + xxh3_64_intdigest(body).to_bytes(8, "little")[:4])
        for at in range(0, len(packed), _RING):  # more than a ring: readers are lapped, no harm
            self._write(first + at, b"".join(packed[at : at + _RING]))
        os.pwrite(self._file, _head.pack(first + len(packed)), _HEAD_AT)
        self.seen = first + len(packed)

    def _write(self, number: int, data: bytes) -> None:
        at = number % _RING * _entry.size
        fits = _RING * _entry.size - at
        os.pwrite(self._file, data[:fits], _START + at)
        if len(data) > fits:
            os.pwrite(self._file, data[fits:], _START)

    def news(self) -> list[Entry] | None:
        """Returns the entries since the last call; None when some of them are lost.

        After None, `seen` is the head: read the writer's tables, and then go on from there.
        """
        head = self.head()
        if head == self.seen:
            return []
        lost = not 0 < head - self.seen < _RING
        entries = None if lost else self._entries(self.seen, head)
        self.seen = head  # not before: what could not be read is read the next time
        return entries

    def _entries(self, first: int, behind: int) -> list[Entry] | None:
        at, count = first % _RING, behind - first
        data = os.pread(self._file, min(count, _RING - at) * _entry.size, _START + at * _entry.size)
        if count > _RING - at:
            data += os.pread(self._file, (count - _RING + at) * _entry.size, _START)
        if len(data) != count * _entry.size:
            return None
        entries, view = [], memoryview(data)
        for expected, (number, what, segment, slot, generation, check) in enumerate(
            _entry.iter_unpack(data), first
        ):
            at = (expected - first) * _entry.size
            body = view[at : at + _body.size]
            if number != expected or check != xxh3_64_intdigest(body) & 0xFFFFFFFF:
                return None
            entries.append(Entry(what & 0xFF, segment, slot, what >> 8, generation))
        return entries

    def put_counters(self, values: Sequence[int]) -> None:
        """Writes the counters of this process, in the order of `COUNTERS`."""
        os.pwrite(self._file, _counters.pack(*values), _COUNTERS_AT)

    def counters(self) -> tuple[int, ...]:
        """Returns the counters of the process that holds or held this writer."""
        data = os.pread(self._file, _counters.size, _COUNTERS_AT)
        return _counters.unpack(data) if len(data) == _counters.size else (0,) * len(COUNTERS)
