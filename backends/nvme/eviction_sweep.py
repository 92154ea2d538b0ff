"""Cold pages go where they lie together: a clock's hand over the slots, with the age of LRU.

Which of the coldest pages goes makes little difference to hits, and much to the runs of slots that
become free. So the hand frees whole extents, and passes over those that are in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.backends.nvme.eviction_policy import NONE, Forest

if TYPE_CHECKING:
    from collections.abc import Container

__all__ = ["FamilySweep"]

_COLD_SHARE = 0.3  # of the extents: the hand frees what is as old as these
_WARMER = 1.1  # the factor to it when an eighth of a round did not give enough
_SAMPLE = 64  # extents whose age is looked at to know how old that is
_AHEAD_SHARE = 16  # of the pages one in so many goes ahead, in one go ...
_AHEAD = 2048  # ... but not more than this


class FamilySweep(Forest):
    """A hand goes over the slots in order and frees cold extents, with all that follows from them.

    An extent is cold when three quarters of it are free or as old as the oldest `_COLD_SHARE` of
    the extents. Its cold pages leave with all that follows them, wherever that lies: a page is read
    with all before it, so what follows a cold page is as cold, and no page stays behind as an
    island because a child of it lies elsewhere. A page that was used since it was stored counts as
    younger, by the age at which pages leave: those that were stored and never asked for go first
    (scan resistance).

    It frees more than it is asked for, up to 1/16 of the pages: room that comes in one piece is
    filled by one chain after the other, and leaves in one piece again.
    """

    def __init__(self, extent: int = 16) -> None:
        """Makes an empty one.

        Args:
            extent: Slots that are looked at together.
        """
        super().__init__()
        self._extent = extent
        self._hand = 0
        self._offset = 0  # where the next sample begins

    def evict(self, count: int, busy: Container[int]) -> list[int]:  # noqa: D102
        chosen: list[int] = []
        want = (
            min(count + min(_AHEAD, self._count // _AHEAD_SHARE), self._count) if count > 0 else 0
        )
        share, extents = _COLD_SHARE, -(-len(self._tick) // self._extent)
        while len(chosen) < want and share < 1:
            limit = self._coldness(share)
            self._lead = max(0, self._now - limit)
            self._sweep(extents // 8 + 1, limit, want, busy, chosen)
            share *= _WARMER
        if len(chosen) < count:  # what is left is hot or lies under busy pages
            self._sweep(extents, 1 << 62, count, busy, chosen)
        return chosen

    def _sweep(
        self, extents: int, limit: int, want: int, busy: Container[int], chosen: list[int]
    ) -> None:
        """Moves the hand over so many extents, until `want` pages are chosen."""
        ticks, size = self._tick, self._extent
        mark = (size - 1) * 3 // 4
        blocked: set[int] = set()
        for _ in range(extents):
            if self._hand >= len(ticks):
                self._hand = 0
            part = ticks[self._hand : self._hand + size]
            if sorted(part)[min(mark, len(part) - 1)] <= limit:
                for slot, tick in enumerate(part, self._hand):
                    if tick and tick <= limit and ticks[slot] and slot not in blocked:
                        self._remove_family(slot, limit, want, busy, chosen, blocked)
                        if len(chosen) >= want:
                            return
            self._hand += size

    def _remove_family(
        self,
        top: int,
        limit: int,
        want: int,
        busy: Container[int],
        chosen: list[int],
        blocked: set[int],
    ) -> None:
        """Removes a page after its descendants, then those before it that lie in a row with it.

        Ends at one that is hot or busy. The pages on the way to that one are `blocked`: whoever
        comes to them turns round.
        """
        child_of, ticks = self._child, self._tick
        slot = top
        while len(chosen) < want:
            while (child := child_of[slot]) != NONE and slot not in blocked:
                slot = child
            if slot in blocked or slot in busy or ticks[slot] > limit:
                while slot != top:
                    blocked.add(slot)
                    slot = self._parent[slot]
                blocked.add(top)
                return
            parent = self._parent[slot]
            self._remove(slot)
            chosen.append(slot)
            if slot == top:
                if parent == NONE or parent != slot - 1:
                    return
                top = parent  # or the beginning of the chain stays, as a short run
            slot = parent

    def _coldness(self, share: float) -> int:
        """Returns the tick that `share` of the extents, empty ones left out, are as old as."""
        ticks, size = self._tick, self._extent
        mark = (size - 1) * 3 // 4
        extents = -(-len(ticks) // size)
        step = max(1, extents // _SAMPLE)
        self._offset = (self._offset + 1) % step
        found = []
        for at in range(self._offset * size, len(ticks), step * size):
            part = sorted(ticks[at : at + size])
            if tick := part[min(mark, len(part) - 1)]:
                found.append(tick)
        found.sort()
        return found[int(len(found) * share)] if found else self._now
