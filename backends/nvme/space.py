"""Free slots of one place as runs of neighbours: what is written together should lie together.

Reads and writes merge neighbouring slots into one system call, so an aged store lives or dies by
the length of its runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Space"]


class Space:
    """Free runs of slot numbers. Numbers of two segments are never neighbours.

    Not thread-safe: the store's lock is held.
    """

    def __init__(self) -> None:
        self.free = 0
        """Slots in all runs."""
        self._length: dict[int, int] = {}  # by first slot
        self._start: dict[int, int] = {}  # by the slot behind the last
        self._by_length: dict[int, dict[int, None]] = {}  # first slots, the oldest run first
        self._lengths: list[int] = []  # the keys of that, rising

    @property
    def longest(self) -> int:
        """Slots of the longest run."""
        return self._lengths[-1] if self._lengths else 0

    def give(self, slots: Iterable[int]) -> None:
        """Takes slots in; neighbours become one run. Runs in the order of `slots` cost least."""
        first = behind = -1
        for slot in slots:
            if slot == behind:
                behind += 1
                continue
            if first >= 0:
                self._give(first, behind - first)
            first, behind = slot, slot + 1
        if first >= 0:
            self._give(first, behind - first)

    def _give(self, first: int, count: int) -> None:
        self.free += count
        if (before := self._start.pop(first, None)) is not None:
            count += self._remove(before)
            first = before
        if first + count in self._length:
            behind = first + count
            del self._start[behind + self._length[behind]]
            count += self._remove(behind)
        self._insert(first, count)

    def take(self, count: int) -> list[tuple[int, int]]:
        """Returns runs (first slot, slots) of `count` slots in all, or of all there are.

        The smallest run that holds the rest, else the longest there is.
        """
        taken = []
        while count and self.free:
            first = self._fitting(count)
            length = self._remove(first)
            del self._start[first + length]
            used = min(count, length)
            if used < length:
                self._insert(first + used, length - used)
            taken.append((first, used))
            self.free -= used
            count -= used
        return taken

    def drop(self, first: int, behind: int) -> None:
        """Forgets the free slots from `first` up to but not with `behind`: their segment goes."""
        for at in [at for at in self._length if first <= at < behind]:
            length = self._remove(at)
            del self._start[at + length]
            self.free -= length

    def runs(self) -> list[tuple[int, int]]:
        """Returns all runs (first slot, slots), in order."""
        return sorted(self._length.items())

    def _fitting(self, count: int) -> int:
        at = bisect_left(self._lengths, count)
        length = self._lengths[min(at, len(self._lengths) - 1)]
        return next(iter(self._by_length[length]))

    def _insert(self, first: int, count: int) -> None:
        self._length[first] = count
        self._start[first + count] = first
        if count not in self._by_length:
            self._by_length[count] = {}
            insort(self._lengths, count)
        self._by_length[count][first] = None

    def _remove(self, first: int) -> int:
        length = self._length.pop(first)
        same = self._by_length[length]
        del same[first]
        if not same:
            del self._by_length[length], self._lengths[bisect_left(self._lengths, length)]
        return length
