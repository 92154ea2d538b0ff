"""What a policy of eviction is, and the tree that all of them keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from math import log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

__all__ = ["NONE", "Forest", "Policy"]

NONE = -1
"""No parent, or one that is not here."""
_LAST_TICK = 2**32 - 1
_FIRST_TICK = 512
_AGE_TICKS = (
    16  # before the first one, for each doubling of an age: 32 of them reach back 136 years
)


class Policy(ABC):
    """The order of eviction among the slots of one place.

    Slot numbers are small integers. Clocks are logical: one tick a call of `added` or `used`. Not
    thread-safe: the store's lock is held. Nothing blocks.
    """

    @abstractmethod
    def added(
        self, slots: Sequence[int], parents: Sequence[int], ages: Sequence[float] = ()
    ) -> None:
        """Pages were stored. In any order.

        A page that is known already counts as used, and gets its parent if it had none.

        Args:
            slots: Theirs.
            parents: Their parents' slots, `NONE` where unknown.
            ages: The seconds since each was stored, for pages that a process before this one
                stored: they are older than all that came since. None: they were stored now.
        """

    @abstractmethod
    def used(self, slots: Iterable[int]) -> None:
        """Pages were read, found, or set again. Slots that hold no page are passed over."""

    @abstractmethod
    def removed(self, slots: Iterable[int]) -> None:
        """Pages were removed by somebody else: deleted, damaged, or their segment is gone."""

    @abstractmethod
    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """Chooses and removes `count` pages, none that is `busy`, children first.

        Fewer when no more may go; a policy may choose some more, where it thereby frees slots that
        lie together.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Returns how many pages it knows."""


class Forest(Policy):
    """Pages by slot, with parents and children: five numbers of 4 bytes a slot.

    There are no cycles, whatever the headers say: a parent that would close one is not taken, and
    what follows a page that was removed becomes a root.
    """

    def __init__(self) -> None:
        self._now = _FIRST_TICK
        self._count = 0
        self._lead = 0  # how far ahead of now the tick of a page that is used is set
        self._tick = array("I")  # of the last use, 0: no page here
        self._parent = array("i")
        self._child = array("i")  # the first
        self._next = array("i")  # sibling
        self._before = array("i")  # sibling

    def __len__(self) -> int:
        return self._count

    def added(  # noqa: D102
        self, slots: Sequence[int], parents: Sequence[int], ages: Sequence[float] = ()
    ) -> None:
        self._pass_time()
        self._reach(max(slots, default=-1))
        ticks, parent_of, now, lead = self._tick, self._parent, self._now, self._lead
        for slot in slots:
            if ticks[slot]:
                ticks[slot] = now + lead
            else:
                ticks[slot] = now
                self._count += 1
        for slot, age in zip(slots, ages, strict=False):
            ticks[slot] = max(1, _FIRST_TICK - int(_AGE_TICKS * log2(1 + max(0.0, age))))
        end = len(ticks)
        for slot, parent in zip(slots, parents, strict=True):
            if parent_of[slot] == NONE and 0 <= parent < end and ticks[parent]:
                self._link(slot, parent)

    def used(self, slots: Iterable[int]) -> None:  # noqa: D102
        self._pass_time()
        ticks, end, tick = self._tick, len(self._tick), self._now + self._lead
        for slot in slots:
            if slot < end and ticks[slot]:
                ticks[slot] = tick

    def removed(self, slots: Iterable[int]) -> None:  # noqa: D102
        for slot in slots:
            if slot < len(self._tick) and self._tick[slot]:
                child = self._child[slot]
                while child != NONE:
                    behind = self._next[child]
                    self._parent[child] = self._next[child] = self._before[child] = NONE
                    child = behind
                self._child[slot] = NONE
                self._remove(slot)

    def _remove(self, slot: int) -> int:
        """Removes a page without children; returns its parent if that has none any more."""
        parent, before, behind = self._parent[slot], self._before[slot], self._next[slot]
        self._tick[slot] = 0
        self._count -= 1
        self._parent[slot] = self._before[slot] = self._next[slot] = NONE
        if behind != NONE:
            self._before[behind] = before
        if before != NONE:
            self._next[before] = behind
        elif parent != NONE:
            self._child[parent] = behind
            if behind == NONE:
                return parent
        return NONE

    def _link(self, slot: int, parent: int) -> None:
        if slot == parent:
            return
        if self._child[slot] != NONE:  # or it cannot be above its parent
            above = parent
            while above != NONE:
                if above == slot:
                    return
                above = self._parent[above]
        first = self._child[parent]
        if first != NONE:
            self._before[first] = slot
        self._next[slot] = first
        self._child[parent] = slot
        self._parent[slot] = parent

    def _pass_time(self) -> None:
        self._now += 1
        if self._now + self._lead > _LAST_TICK:
            self._forget_time()

    def _forget_time(self) -> None:
        """Ticks are 32 bits: at their end the older half of all time becomes one tick."""
        back = self._now // 2
        self._now -= back
        self._lead = min(self._lead, self._now)
        self._tick = array("I", [t and max(1, t - back) for t in self._tick])

    def _reach(self, slot: int) -> None:
        """Makes the arrays hold a slot."""
        if (more := slot + 1 - len(self._tick)) > 0:
            self._tick.frombytes(bytes(4 * more))
            for links in (self._parent, self._child, self._next, self._before):
                links.extend(array("i", [NONE]) * more)
