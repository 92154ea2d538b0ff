"""The part of a place that this process writes: its own segments, their free slots, and who goes.

Slots of all segments of a shelf have numbers in one line, with a gap between two segments, so that
no run of neighbours reaches from one file into another.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from l3store.backends.nvme.eviction import NONE
from l3store.backends.nvme.index import SLOT_BITS
from l3store.backends.nvme.space import Space

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from l3store.backends.nvme.eviction import Policy
    from l3store.backends.nvme.format import Geometry
    from l3store.backends.nvme.segment import Segment

__all__ = ["IDLE_SECONDS", "Run", "Shelf", "runs_of"]

IDLE_SECONDS = 600.0
"""A place that no call was about for so long gives its segments to others first."""
_GRACE_SECONDS = 60.0  # the same for a place that came from a dead writer and no call was about yet

Run = tuple["Segment", int, int]
"""Neighbouring slots: segment, first slot, how many."""


class Shelf:
    """Guarded by the store's lock."""

    def __init__(self, geometry: Geometry, policy: Policy) -> None:
        self.geometry = geometry
        self.policy = policy
        self.space = Space()
        self.used_at = time.monotonic() - IDLE_SECONDS + _GRACE_SECONDS
        """When a call was last about this place."""
        self._stride = geometry.slots + 1
        self._segments: list[Segment | None] = []
        self._index: dict[int, int] = {}  # segment number -> position

    @property
    def segments(self) -> list[Segment]:
        """Its segments."""
        return [segment for segment in self._segments if segment is not None]

    def __contains__(self, segment: Segment) -> bool:
        """Returns whether this is one of its segments."""
        position = self._index.get(segment.number)
        return position is not None and self._segments[position] is segment

    def add(self, segment: Segment) -> None:
        """Takes a segment in. Its empty slots are free; of its pages the policy must be told."""
        try:
            position = self._segments.index(None)
            self._segments[position] = segment
        except ValueError:
            position = len(self._segments)
            self._segments.append(segment)
        self._index[segment.number] = position
        base = position * self._stride
        if not segment.failed:
            self.space.give(base + i for i, value in enumerate(segment.pages) if value is None)

    def drop(self, segment: Segment) -> None:
        """Forgets a segment and all its slots."""
        position = self._index.pop(segment.number)
        self._segments[position] = None
        base = position * self._stride
        self.space.drop(base, base + self._stride)
        self.policy.removed(range(base, base + self._stride - 1))

    def fail(self, segment: Segment) -> None:
        """Nothing new goes into a segment; what is in it stays, and makes no room."""
        segment.failed = True
        base = self._index[segment.number] * self._stride
        self.space.drop(base, base + self._stride)
        self.policy.removed(range(base, base + self._stride - 1))

    def number(self, segment: Segment, slot: int) -> int:
        """Returns the number of a slot in this shelf's line."""
        return self._index[segment.number] * self._stride + slot

    def parent(self, location: int | None) -> int:
        """Returns the number of the slot that an index value means, `NONE` if it is not here."""
        if location is None:
            return NONE
        position = self._index.get(location >> SLOT_BITS)
        if position is None:
            return NONE
        return position * self._stride + (location & (1 << SLOT_BITS) - 1)

    def numbers(self, locations: Iterable[int]) -> set[int]:
        """Returns the numbers of those index values that are in this shelf."""
        found, index, stride = set(), self._index, self._stride
        for location in locations:
            position = index.get(location >> SLOT_BITS)
            if position is not None:
                found.add(position * stride + (location & (1 << SLOT_BITS) - 1))
        return found

    def take(self, count: int) -> list[Run]:
        """Takes `count` free slots, or all there are, in as few runs as possible."""
        return [self._run(first, length) for first, length in self.space.take(count)]

    def give(self, segment: Segment, slots: Iterable[int]) -> None:
        """Slots are free again, in rising order for the least work."""
        if not segment.failed:
            base = self._index[segment.number] * self._stride
            self.space.give(base + slot for slot in slots)

    def runs(self, numbers: Sequence[int]) -> Iterator[Run]:
        """Yields the runs that numbers make."""
        for first, length in runs_of(sorted(numbers)):
            yield self._run(first, length)

    def _run(self, first: int, length: int) -> Run:
        segment = self._segments[first // self._stride]
        if segment is None:
            raise AssertionError("a slot of a segment that was dropped")
        return segment, first % self._stride, length


def runs_of(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (first, length) of neighbouring numbers; they rise."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[start], at - start
            start = at
