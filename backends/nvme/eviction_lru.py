"""The leaf that was used longest ago goes."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from l3store.backends.nvme.eviction_policy import NONE, Forest

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

__all__ = ["LeafLRU"]

_SLOT_BITS = 32


class LeafLRU(Forest):
    """Exactly LRU among the leaves; it knows nothing of places on the drive.

    A heap holds every leaf by its last use as it was when it came in; an entry that comes out is
    put back when the page was used since. So a use costs one store in an array. Entries of pages
    that have children again, or are gone, stay in it until they come out or it is made anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self._leaves: list[int] = []  # tick << 32 | slot

    def added(  # noqa: D102
        self, slots: Sequence[int], parents: Sequence[int], ages: Sequence[float] = ()
    ) -> None:
        super().added(slots, parents, ages)
        for slot in slots:
            if self._child[slot] == NONE:
                heappush(self._leaves, self._tick[slot] << _SLOT_BITS | slot)
        self._bound()

    def removed(self, slots: Iterable[int]) -> None:  # noqa: D102
        super().removed(slots)
        self._bound()

    def evict(self, count: int, busy: Container[int]) -> list[int]:  # noqa: D102
        chosen: list[int] = []
        held: list[int] = []
        while len(chosen) < count and self._leaves:
            entry = heappop(self._leaves)
            slot, tick = entry & (1 << _SLOT_BITS) - 1, entry >> _SLOT_BITS
            if not self._tick[slot] or self._child[slot] != NONE:
                continue
            if self._tick[slot] != tick:
                heappush(self._leaves, self._tick[slot] << _SLOT_BITS | slot)
            elif slot in busy:
                held.append(entry)
            else:
                self._remove(slot)
                chosen.append(slot)
        for entry in held:
            heappush(self._leaves, entry)
        return chosen

    def _remove(self, slot: int) -> int:
        parent = super()._remove(slot)
        if parent != NONE:
            heappush(self._leaves, self._tick[parent] << _SLOT_BITS | parent)
        return parent

    def _forget_time(self) -> None:
        super()._forget_time()
        self._renew()

    def _bound(self) -> None:
        if len(self._leaves) > 2 * self._count + 64:
            self._renew()

    def _renew(self) -> None:
        self._leaves = [
            tick << _SLOT_BITS | slot
            for slot, tick in enumerate(self._tick)
            if tick and self._child[slot] == NONE
        ]
        heapify(self._leaves)
