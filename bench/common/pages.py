"""Batches of pages: names, payloads that tell which page they are, memory that no cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from l3store import page
from l3store.abc import Segments
from l3store.bench.ruler import pool_bytes
from l3store.keys import Chain
from l3store.replay.engine import page_hashes
from l3store.replay.payload import Payloads, aligned_buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SHAPES", "Batch", "Memory", "Shape", "size_name"]

KIB = 1 << 10


class Shape(NamedTuple):
    """How pages are and how many a call moves."""

    page_bytes: int
    batch: int
    segments: int = 1

    @property
    def batch_bytes(self) -> int:
        return self.page_bytes * self.batch

    @property
    def name(self) -> str:
        pieces = f"{self.segments} segment{'s' * (self.segments > 1)}"
        return f"{size_name(self.page_bytes)} x {self.batch}, {pieces}"


SHAPES = (
    Shape(64 * KIB, 128), Shape(128 * KIB, 128), Shape(1024 * KIB, 32), Shape(4096 * KIB, 8),
)  # fmt: skip


def size_name(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


@dataclass(frozen=True)
class Batch:
    """The pages of one call: stretches of one or several prefixes."""

    chains: tuple[Chain, ...]
    hashes: tuple[bytes, ...]
    keys: list[str]

    @classmethod
    def of(cls, chains: Sequence[Chain], place: str) -> Batch:
        hashes = tuple(value for chain in chains for value in chain.hashes)
        return cls(tuple(chains), hashes, [f"{place}/{value.hex()}" for value in hashes])

    @classmethod
    def numbered(cls, number: int, shape: Shape, place: str) -> Batch:
        """Returns batch `number`, a prefix of its own; the same one for the same arguments."""
        first = number * shape.batch
        return cls.of([Chain(page_hashes(0, range(first, first + shape.batch)))], place)


class Memory:
    """Page-aligned buffers that batches take in turn, more than the largest CPU cache."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.turns = max(2, -(-pool_bytes() // shape.batch_bytes))
        self._buffers = aligned_buffer(self.turns * shape.batch, shape.page_bytes)
        self._payloads = Payloads(shape.page_bytes, 0)
        step = shape.page_bytes // shape.segments
        self._pieces = [
            [buffer[at : at + step] for at in range(0, shape.page_bytes, step)]
            for buffer in self._buffers
        ]
        for buffer in self._buffers:  # untouched memory is one shared page of zeros
            self._payloads.poison(buffer)

    def pieces(self, turn: int) -> list[list[memoryview]]:
        """Returns the payload pieces of each page of a turn."""
        return self._pieces[self._part(turn)]

    def sealed(self, batch: Batch, turn: int, place: str) -> list[Segments]:
        """Fills a turn's buffers with a batch and returns its pages, checksums made."""
        for value, buffer in zip(batch.hashes, self._buffers[self._part(turn)], strict=True):
            self._payloads.write(value, buffer)
        pieces, sealed = iter(self.pieces(turn)), list[Segments]()
        for chain in batch.chains:
            sealed += page.seal(place, chain, [next(pieces) for _ in chain.hashes])
        return sealed

    def room(self, turn: int) -> list[Segments]:
        """Returns a turn's buffers, poisoned, as `page_get` takes them."""
        self.poison(turn)
        return page.frame(self.pieces(turn))

    def poison(self, turn: int) -> None:
        """A byte in each sector of a turn: what is not overwritten is told by `wrong`."""
        for buffer in self._buffers[self._part(turn)]:
            buffer[::512] = b"\xa7" * -(-len(buffer) // 512)

    def wrong(self, batch: Batch, turn: int, done: Sequence[bool]) -> int:
        """Returns how many pages did not come, or with a wrong byte."""
        buffers = self._buffers[self._part(turn)]
        return sum(
            not (good and self._payloads.matches(value, buffer))
            for value, good, buffer in zip(batch.hashes, done, buffers, strict=True)
        )

    def _part(self, turn: int) -> slice:
        start = turn % self.turns * self.shape.batch
        return slice(start, start + self.shape.batch)
