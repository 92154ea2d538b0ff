"""Which pages of a place go first when room is needed.

A policy sees slot numbers and their parents' slot numbers, and no bytes. Parents leave after their
children, so what is left of a chain is always its beginning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

__all__ = ["POLICIES", "LeafLRU", "Policy"]

NONE = -1
"""No parent, or one that is not here."""


class Policy(ABC):
    """The order of eviction among the slots of one place.

    Slot numbers are small integers. Clocks are logical: one tick a call of `added` or `used`. Not
    thread-safe: the store's lock is held. Nothing blocks.
    """

    @abstractmethod
    def added(self, slots: Sequence[int], parents: Sequence[int]) -> None:
        """Pages were stored; their parents' slots, `NONE` where unknown. In order of the chain."""

    @abstractmethod
    def used(self, slots: Iterable[int]) -> None:
        """Pages were read, found, or set again. Slots that hold no page are passed over."""

    @abstractmethod
    def removed(self, slots: Iterable[int]) -> None:
        """Pages were removed by somebody else: deleted, damaged, or their segment is gone."""

    @abstractmethod
    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """Chooses and removes at most `count` pages, none that is `busy`, children first."""

    @abstractmethod
    def oldest(self) -> int:
        """Returns the tick at which the next to go was used last; a large number when none is."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns how many pages it knows."""


class LeafLRU(Policy):
    """The leaf that was used longest ago.

    A heap holds every page without children, by its last use as it was when it came in; the entry
    that comes out is put back when the page was used since. So a use costs one store in an array.
    """

    def __init__(self) -> None:
        self._now = 0
        self._used = array("I")  # tick of the last use, 0: no page here
        self._parent = array("i")
        self._children = array("I")
        self._leaves: list[int] = []  # tick << 32 | slot
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def added(self, slots: Sequence[int], parents: Sequence[int]) -> None:  # noqa: D102
        self._now += 1
        self._reach(max(slots, default=-1))
        used, parent_of, children = self._used, self._parent, self._children
        for slot, parent in zip(slots, parents, strict=True):
            if used[slot]:
                continue
            self._count += 1
            used[slot] = self._now
            children[slot] = 0
            if parent != NONE and parent != slot and parent < len(used) and used[parent]:
                parent_of[slot] = parent
                children[parent] += 1
            else:
                parent_of[slot] = NONE
        for slot in slots:
            if not children[slot]:
                heappush(self._leaves, self._now << 32 | slot)

    def used(self, slots: Iterable[int]) -> None:  # noqa: D102
        self._now += 1
        used, end = self._used, len(self._used)
        for slot in slots:
            if slot < end and used[slot]:
                used[slot] = self._now

    def removed(self, slots: Iterable[int]) -> None:  # noqa: D102
        for slot in slots:
            if slot < len(self._used) and self._used[slot]:
                self._remove(slot)

    def evict(self, count: int, busy: Container[int]) -> list[int]:  # noqa: D102
        chosen: list[int] = []
        held: list[int] = []
        while len(chosen) < count:
            if not self._leaves:
                if not self._break_a_cycle(busy):
                    break
                continue
            entry = heappop(self._leaves)
            slot, tick = entry & 0xFFFFFFFF, entry >> 32
            if not self._used[slot] or self._children[slot]:
                continue
            if self._used[slot] != tick:
                heappush(self._leaves, self._used[slot] << 32 | slot)
            elif slot in busy:
                held.append(entry)
            else:
                self._remove(slot)
                chosen.append(slot)
        for entry in held:
            heappush(self._leaves, entry)
        return chosen

    def oldest(self) -> int:  # noqa: D102
        return self._leaves[0] >> 32 if self._leaves else 1 << 62

    def _remove(self, slot: int) -> None:
        parent = self._parent[slot]
        self._used[slot] = 0
        self._count -= 1
        if parent != NONE and self._used[parent] and self._children[parent]:
            self._children[parent] -= 1
            if not self._children[parent]:
                heappush(self._leaves, self._used[parent] << 32 | parent)

    def _break_a_cycle(self, busy: Container[int]) -> bool:
        """Headers may lie: pages that are each other's parents are never leaves."""
        free = [i for i, tick in enumerate(self._used) if tick and i not in busy]
        if not free:
            return False
        slot = min(free, key=self._used.__getitem__)
        self._children[slot] = 0
        self._leaves = [self._used[slot] << 32 | slot]
        heapify(self._leaves)
        return True

    def _reach(self, slot: int) -> None:
        if slot >= len(self._used):
            more = slot + 1 - len(self._used)
            self._used.extend([0] * more)
            self._parent.extend([NONE] * more)
            self._children.extend([0] * more)


POLICIES: dict[str, type[Policy]] = {"lru": LeafLRU}
"""By the value of the option ``evict``."""
