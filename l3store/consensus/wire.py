"""Facts and records as bytes: fixed little-endian layouts, the same in frames, votes and carriers.

Nothing is unpickled. A text starts with 12 bytes: magic ``L3CS``, format version u16, kind u8, one
zero byte, whole length u32; then come a fixed part, and arrays whose lengths it tells. Whatever
does not fit exactly is a `ValueError`; a reader drops it and counts it.
"""

from __future__ import annotations

from math import isfinite
from struct import Struct, calcsize, pack, unpack
from typing import TYPE_CHECKING, Any

from l3store.consensus.values import ALL_ENDS, NO_ACKS, Acks, Bounds, Facts, Kind, Record, Row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from l3store.consensus.values import OpFacts, OpId, TicketId

__all__ = ["VERSION", "Rows", "decode_facts", "decode_record", "encode_facts", "encode_record"]

VERSION = 1
_MAGIC = b"L3CS"
_HEAD = "<4sHBxL"
_FACTS, _RECORD = 1, 2
_FACTS_FIXED = Struct(f"{_HEAD}QLQQQQHLL")
"""Head; incarnation, rank, seq, applied, veto, ready; numbers of digests, rows, sets of ends."""
_ROW = Struct("<QQLLL??")
_RECORD_FIXED = Struct(f"{_HEAD}QdQ?LL")
"""Head; number, now, epoch, storage on; numbers of rows, sets of ends."""
_BOUNDS = Struct("<QLLLLL?")
_ENDS = Struct("<QL")
_COUNTS = Struct("<QLL")
"""Of one kind of operation: floor, how many ended above it, how many failed."""
_FLOORS = Struct("<" + "QLL" * len(Kind))
"""The same of all kinds, where no number follows."""
_NOTHING = bytes(_FLOORS.size)


def encode_facts(facts: Facts) -> bytes:
    """Returns what `decode_facts` reads."""
    parts = [
        pack(f"<{len(facts.digests)}L", *facts.digests),
        *[_ROW.pack(*row) for row in facts.rows],
        *_sets(facts.ends),
    ]
    for (floor, above), failed in zip(facts.acked, facts.failed, strict=True):
        parts += _operations(floor, above, failed)
    return _text(
        _FACTS, parts, _FACTS_FIXED, facts.incarnation, facts.rank, facts.seq, facts.applied,
        facts.veto, facts.ready, len(facts.digests), len(facts.rows), len(facts.ends),
    )  # fmt: skip


def decode_facts(data: bytes | memoryview, rows: Rows | None = None) -> Facts:
    """Returns the facts of a report.

    Args:
        data: Its text.
        rows: Those of the rank's last report; they become those of this one.

    Raises:
        ValueError: It is not exactly the text of facts, of this version.
    """
    data = bytes(data)
    incarnation, rank, seq, applied, veto, ready, n_digests, n_rows, n_ends = _fixed(
        data, _FACTS, _FACTS_FIXED
    )
    reader = _Reader(data, _FACTS_FIXED.size)
    digests = reader.numbers("L", n_digests)
    kept = rows or Rows()
    found = kept.read(reader.take(_ROW.size * n_rows))
    ends = reader.sets(n_ends) if n_ends else {}
    acked, failed = kept.read_acks(reader.rest())
    return Facts(
        incarnation, rank, seq, applied, digests, found, ends, acked, failed, veto, ready
    )  # fmt: skip


def encode_record(record: Record) -> bytes:
    """Returns what `decode_record` reads."""
    ends = {ticket: row.ends for ticket, row in record.rows.items() if row.ends != ALL_ENDS}
    parts = [
        *[_BOUNDS.pack(ticket, *row[:-1]) for ticket, row in record.rows.items()],
        *_sets(ends),
    ]
    if record.acks == NO_ACKS:
        parts.append(_NOTHING)
    else:
        for acks in record.acks:
            parts += _operations(0, acks.ended, acks.failed)
    return _text(
        _RECORD, parts, _RECORD_FIXED, record.number, record.now, record.epoch, record.storage_on,
        len(record.rows), len(ends),
    )  # fmt: skip


class Rows:
    """Rows and acks of one rank's last report: what is the same in the next is not read again."""

    def __init__(self) -> None:
        self._data = b""
        self._texts: frozenset[bytes] = frozenset()
        self._rows: frozenset[Row] = frozenset()
        self._acks_data: bytes | None = None
        self._acks: OpFacts = ((), ())

    def read(self, data: bytes) -> frozenset[Row]:
        """Returns the rows of a report, all of them; only those that are new are read."""
        if data != self._data:
            texts = frozenset(unpack(f"{_ROW.size}s" * (len(data) // _ROW.size), data))
            gone = _ROW.iter_unpack(b"".join(self._texts - texts))
            new = _ROW.iter_unpack(b"".join(texts - self._texts))
            self._rows = self._rows.difference(gone).union(map(Row._make, new))
            self._data, self._texts = data, texts
        return self._rows

    def read_acks(self, data: bytes) -> OpFacts:
        """Returns what is acked and what has failed, of all kinds.

        Raises:
            ValueError: It is not exactly that.
        """
        if data != self._acks_data:
            reader = _Reader(data)
            kinds = reader.kinds()
            reader.end()
            self._acks = (
                tuple((floor, frozenset(above)) for floor, above, _ in kinds),
                tuple(frozenset(failed) for _, _, failed in kinds),
            )
            self._acks_data = data
        return self._acks


def decode_record(data: bytes | memoryview) -> Record:
    """Returns the record.

    Raises:
        ValueError: It is not exactly the text of a record, of this version.
    """
    data = bytes(data)
    number, now, epoch, storage_on, n_rows, n_ends = _fixed(data, _RECORD, _RECORD_FIXED)
    reader = _Reader(data, _RECORD_FIXED.size)
    rows = {ticket: Bounds(*row) for ticket, *row in reader.many(_BOUNDS, n_rows)}
    if not isfinite(now) or len(rows) < n_rows:
        raise ValueError(f"record {number}: {n_rows} rows of {len(rows)} tickets at {now} s")
    for ticket, ends in reader.sets(n_ends).items() if n_ends else ():
        if ticket not in rows:
            raise ValueError(f"end points of ticket {ticket} without its row")
        rows[ticket] = rows[ticket]._replace(ends=ends)
    tail = reader.rest()
    if tail == _NOTHING:
        return Record(number, now, epoch, storage_on, rows)
    reader = _Reader(tail)
    kinds = reader.kinds()
    reader.end()
    if any(floor or not set(failed) <= set(ended) for floor, ended, failed in kinds):
        raise ValueError(f"record {number}: operations that failed and have not ended")
    acks = tuple(Acks(ended, frozenset(failed)) for _, ended, failed in kinds)
    return Record(number, now, epoch, storage_on, rows, acks)


# -- parts ----------------------------------------------------------------------------------------


def _text(kind: int, parts: list[bytes], layout: Struct, *fixed: float) -> bytes:
    length = layout.size + sum(map(len, parts))
    return b"".join((layout.pack(_MAGIC, VERSION, kind, length, *fixed), *parts))


def _fixed(data: bytes, kind: int, layout: Struct) -> list[Any]:
    """Returns the fixed part of a text, behind its head."""
    if len(data) < layout.size:
        raise ValueError(f"a text of {len(data)} bytes ends too early")
    magic, version, found, length, *fixed = layout.unpack_from(data)
    if magic != _MAGIC or found != kind or length != len(data):
        raise ValueError(f"{len(data)} bytes are no text of kind {kind}")
    if version != VERSION:
        raise ValueError(f"format version {version}; this is version {VERSION}")
    return fixed


def _sets(ends: Mapping[TicketId, int]) -> list[bytes]:
    parts = []
    for ticket, bits in ends.items():
        data = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
        parts += [_ENDS.pack(ticket, len(data)), data]
    return parts


def _operations(floor: int, ended: Collection[int], failed: Collection[int]) -> list[bytes]:
    counts = _COUNTS.pack(floor, len(ended), len(failed))
    if not ended and not failed:
        return [counts]
    return [
        counts,
        pack(f"<{len(ended) + len(failed)}Q", *ended, *failed),
    ]


class _Reader:
    """Takes a text, or a part of one, apart; a read past its end is a `ValueError`."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data, self._at = data, at

    def take(self, size: int) -> bytes:
        at = self._at
        self._at = end = at + size
        if end > len(self._data):
            raise ValueError(f"a text of {len(self._data)} bytes ends too early")
        return self._data[at:end]

    def rest(self) -> bytes:
        return self.take(max(len(self._data) - self._at, 0))

    def one(self, layout: Struct) -> tuple[Any, ...]:
        at = self._at
        self._at = end = at + layout.size
        if end > len(self._data):
            raise ValueError(f"a text of {len(self._data)} bytes ends too early")
        return layout.unpack_from(self._data, at)

    def many(self, layout: Struct, count: int) -> Iterator[tuple[Any, ...]]:
        return layout.iter_unpack(self.take(layout.size * count))

    def numbers(self, letter: str, count: int) -> tuple[int, ...]:
        return unpack(f"<{count}{letter}", self.take(count * calcsize(f"<{letter}")))

    def sets(self, count: int) -> dict[TicketId, int]:
        found = {}
        for _ in range(count):
            ticket, size = self.one(_ENDS)
            found[ticket] = int.from_bytes(self.take(size), "little")
        return found

    def kinds(self) -> list[tuple[OpId, tuple[OpId, ...], tuple[OpId, ...]]]:
        if len(self._data) - self._at == _COUNTS.size * len(Kind):  # as a rule: only floors
            counts = _FLOORS.unpack(self._data[self._at :])
            if not any(counts[1::3]) and not any(counts[2::3]):
                self._at = len(self._data)
                return [(floor, (), ()) for floor in counts[::3]]
        return [self.operations() for _ in Kind]

    def operations(self) -> tuple[OpId, tuple[OpId, ...], tuple[OpId, ...]]:
        floor, ended, failed = self.one(_COUNTS)
        return floor, self.numbers("Q", ended), self.numbers("Q", failed)

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes behind the end of a text")
