"""Free slots of one place as runs of neighbours: what is written together should lie together.

Reads and writes merge neighbouring slots into one system call, so an aged store lives or dies by
the length of its runs.
"""

from __future__ import annotations

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
        # First slots of runs of 2**k up to 2**(k+1) - 1 slots; a dict keeps the order of age.
        self._sizes: list[dict[int, None]] = []

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
        least = count.bit_length() - 1
        for size in range(least, len(self._sizes)):
            for first in self._sizes[size]:
                if self._length[first] >= count:
                    return first
        for size in range(min(least, len(self._sizes) - 1), -1, -1):
            if self._sizes[size]:
                return max(self._sizes[size], key=self._length.__getitem__)
        raise AssertionError("free slots, but no run")

    def _insert(self, first: int, count: int) -> None:
        self._length[first] = count
        self._start[first + count] = first
        size = count.bit_length() - 1
        while len(self._sizes) <= size:
            self._sizes.append({})
        self._sizes[size][first] = None

    def _remove(self, first: int) -> int:
        length = self._length.pop(first)
        del self._sizes[length.bit_length() - 1][first]
        return length
