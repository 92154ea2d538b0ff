"""What engines get wrong about votes, as streams that do it: each is to be found out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from l3store.consensus.votes import Hits, Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.consensus.votes import Reached, Tag

__all__ = ["RIGHT", "Habits", "HabitualHits", "HabitualProgress"]


@dataclass(frozen=True, slots=True)
class Habits:
    """What engines get wrong about votes. By default nothing."""

    skips_empty: bool = False
    """No vote on a hit when the rank has found nothing."""
    counts_own_hit: bool = False
    """The number of batches comes from the rank's own hit."""
    unallocated_skips: bool = False
    """A rank that found no memory makes no votes on progress."""
    aborted_skips: bool = False
    """The votes on a ticket end on a rank when it applies the abort."""
    tags: bool = True
    """Votes say what they are on, and it is looked at."""


RIGHT = Habits()


class HabitualHits(Hits):
    """Hits, as an engine with habits votes on them."""

    habits = RIGHT

    def _vote(self) -> tuple[Tag, bytes] | None:
        while self.habits.skips_empty:
            ballot = self._table.ballot(self._ticket)
            if ballot is None or ballot.hit != 0:
                break
            self._table.voted_hit(self._ticket)
            self._ticket += 1
        return super()._vote()

    def _compare(self, tags: dict[int, Tag]) -> None:
        if self.habits.tags:
            super()._compare(tags)


class HabitualProgress(Progress):
    """Progress, as an engine with habits votes on it."""

    habits = RIGHT

    def _vote(self) -> tuple[Tag, bytes] | None:
        while (ticket := self._table.grant()) is not None:
            ballot = self._table.ballot(ticket)
            if ballot is None:
                break
            unallocated = ballot.final and not ballot.done and not ballot.settled
            if not (self.habits.unallocated_skips and unallocated) and not (
                self.habits.aborted_skips and ballot.settled
            ):
                break
            self._table.voted_progress()
            self._number = 0
        return super()._vote()

    def _compare(self, tags: dict[int, Tag]) -> None:
        if self.habits.tags:
            super()._compare(tags)

    def _over(self, tag: Tag, votes: Sequence[Reached]) -> bool:
        if not self.habits.counts_own_hit:
            return super()._over(tag, votes)
        ballot = self._table.ballot(tag.ticket)
        own = ballot.hit if ballot else 0
        return (self._number + 1) * self._config.batch_pages >= own
