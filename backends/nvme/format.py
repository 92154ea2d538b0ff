"""The bytes of a segment file: superblock, slot table, slots.

    0                4 KiB superblock: what this segment is
    4096             slot table: 256 B a slot, rounded up to 4 KiB
    data_offset      slots: one payload each, rounded up to 4 KiB

Little endian. A slot's record holds the page's header and says that the slot is live; there is no
other metadata. Records are 256 B at multiples of 256, so none crosses a sector.
docs/backends/nvme.md shows the tables.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from l3store.errors import IntegrityError
from l3store.keys import check_place
from l3store.page import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ALIGN",
    "DEAD",
    "FORMAT",
    "LIVE",
    "RECORD_BYTES",
    "SUPERBLOCK_BYTES",
    "Geometry",
    "Superblock",
    "boot_id",
    "histories",
    "live_pages",
    "pack_record",
    "pack_records",
    "record_holds",
    "records",
]

FORMAT = 1
ALIGN = 4096
SUPERBLOCK_BYTES = 4096
RECORD_BYTES = 256
MAX_SLOTS = 1 << 20
LIVE = 0x4556494C  # "LIVE"
DEAD = bytes(RECORD_BYTES)
"""The record of a free slot."""

_MAGIC = b"L3SEGMNT"
_DURABLE = 1

# magic, format, flags, segment bytes, number, slots, payload bytes, writer, boot, identity, place
_superblock = Struct("<8sIIQIIQ16s16s16s256s")
_sum = Struct("<Q")
# header, generation, state, zero, payload length | sum of these 152 bytes, zeros
_record = Struct(f"<{HEADER_BYTES}sQIIQQ96x")
_summed = Struct(f"<{HEADER_BYTES}sQIIQ")
_record_tail = Struct("<Q96x")
assert _record.size == _summed.size + _record_tail.size == RECORD_BYTES


def _up(value: int, step: int = ALIGN) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class Geometry:
    """Where things lie in a segment of so many bytes whose pages have so many payload bytes."""

    segment_bytes: int
    payload_bytes: int

    @cached_property
    def slot_bytes(self) -> int:
        """The payload, rounded up to 4096."""
        return _up(self.payload_bytes)

    @cached_property
    def slots(self) -> int:
        """How many pages fit; 0 for a payload that is too large."""
        count = (self.segment_bytes - SUPERBLOCK_BYTES) // (self.slot_bytes + RECORD_BYTES)
        while count > 0 and self._head(count) + count * self.slot_bytes > self.segment_bytes:
            count -= 1
        return min(max(count, 0), MAX_SLOTS)

    @cached_property
    def data_offset(self) -> int:
        """Where slot 0 begins."""
        return self._head(self.slots)

    def _head(self, slots: int) -> int:
        return SUPERBLOCK_BYTES + _up(slots * RECORD_BYTES)


@dataclass(frozen=True)
class Superblock:
    """What a segment says of itself."""

    number: int
    place: str
    geometry: Geometry
    writer: bytes
    """16 bytes: the id whose lock the owner holds."""
    boot: bytes
    """16 bytes: the boot in which its records were known to be whole."""
    identity: bytes
    """16 random bytes: a file that was made anew under this number is another segment."""
    durable: bool
    """Written with ``durability=batch`` only: a record that is there tells the truth also after a
    power cut."""

    def pack(self) -> bytes:
        """Returns the 4 KiB."""
        geometry = self.geometry
        body = _superblock.pack(
            _MAGIC, FORMAT, _DURABLE if self.durable else 0, geometry.segment_bytes, self.number,
            geometry.slots, geometry.payload_bytes, self.writer, self.boot, self.identity,
            self.place.encode("ascii"),
        )  # fmt: skip
        return (body + _sum.pack(xxh3_64_intdigest(body))).ljust(SUPERBLOCK_BYTES, b"\0")

    @classmethod
    def parse(cls, data: bytes, number: int, segment_bytes: int) -> Superblock:
        """Reads the superblock of segment `number`, from bytes that nobody vouches for.

        Raises:
            IntegrityError: It is none, or that of another number, size or format.
        """
        if len(data) < SUPERBLOCK_BYTES:
            raise IntegrityError("not a segment: cut short", reason="truncated")
        fields = _superblock.unpack_from(data)
        (checksum,) = _sum.unpack_from(data, _superblock.size)
        magic, form, flags, size, own, slots, payload, writer, boot, identity, place = fields
        if magic != _MAGIC or checksum != xxh3_64_intdigest(data[: _superblock.size]):
            raise IntegrityError("not a segment: its superblock does not hold", reason="magic")
        if form != FORMAT:
            raise IntegrityError(f"segment of format {form}; this is {FORMAT}", reason="version")
        geometry = Geometry(size, payload)
        try:
            name = check_place(place.rstrip(b"\0").decode("ascii"))
        except ValueError as error:
            raise IntegrityError(f"segment of no place: {error}", reason="place") from error
        if (own, size) != (number, segment_bytes) or not slots or slots != geometry.slots:
            raise IntegrityError(f"segment {own} of {size} bytes stands here", reason="length")
        return cls(own, name, geometry, writer, boot, identity, bool(flags & _DURABLE))


def pack_record(header: bytes | memoryview, generation: int, payload_bytes: int) -> bytes:
    """Returns the record of a live slot."""
    return pack_records([header], generation, payload_bytes)


def pack_records(
    headers: Iterable[bytes | memoryview], generation: int, payload_bytes: int
) -> bytes:
    """Returns the records of neighbouring live slots; generations rise by one. 0.7 us a slot."""
    pack, tail, xxh3 = _summed.pack, _record_tail.pack, xxh3_64_intdigest
    parts: list[bytes] = []
    for number, header in enumerate(headers, generation):
        body = pack(bytes(header), number, LIVE, 0, payload_bytes)
        parts += (body, tail(xxh3(body)))
    return b"".join(parts)


def records(table: bytes) -> list[tuple[bytes, int, int, int, int, int]]:
    """Returns (header, generation, state, zero, payload length, sum) of each record in `table`."""
    return list(_record.iter_unpack(table))


def record_holds(record: bytes | memoryview) -> bool:
    """Returns whether a record is live and its own sum holds."""
    header, generation, state, zero, length, checksum = _record.unpack(record)
    expected = xxh3_64_intdigest(_summed.pack(header, generation, state, zero, length))
    return bool(state == LIVE and checksum == expected)


# Of a record what the index needs: place digest, page hash, generation, state, length, sum.
_indexed = Struct("<16x16s32s64xQI4xQQ96x")


def live_pages(table: bytes, digest: bytes, payload_bytes: int) -> list[tuple[int, bytes, int]]:
    """Returns (slot, page hash, generation) of each live record of a place. About 1 us a slot."""
    view, xxh3, size = memoryview(table), xxh3_64_intdigest, _summed.size
    return [
        (slot, value, generation)
        for slot, (place, value, generation, state, length, checksum) in enumerate(
            _indexed.iter_unpack(table)
        )
        if state == LIVE
        and place == digest
        and length == payload_bytes
        and checksum == xxh3(view[slot * RECORD_BYTES : slot * RECORD_BYTES + size])
    ]


def boot_id() -> bytes:
    """Returns the 16 bytes that name this boot of the machine (Linux: random(4))."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


# Of a record what eviction needs: parent hash, created.
_history = Struct(f"<64x32s8xQ16x{RECORD_BYTES - HEADER_BYTES}x")


def histories(table: bytes) -> list[tuple[bytes, int]]:
    """Returns (parent's page hash, ns since 1970 when it was made) of each record, live or not."""
    return list(_history.iter_unpack(table))
