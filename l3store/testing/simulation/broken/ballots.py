"""Faults of votes, under `collective`: which ones a rank owes, and what proves that they pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from l3store.consensus.collective import Collective
from l3store.consensus.state import Said, State
from l3store.consensus.values import UNLIMITED
from l3store.consensus.votes import Hits, Progress, VoteTable
from l3store.testing.simulation.broken.base import Broken
from l3store.testing.simulation.world import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.consensus.values import Facts, TicketId
    from l3store.consensus.votes import Ballot, Reached, Tag

__all__ = ["BALLOTS"]


def _broken(
    name: str,
    rule: str,
    *,
    hits: type[Hits] = Hits,
    progress: type[Progress] = Progress,
    table: type[VoteTable] = VoteTable,
    said: type[Said] = Said,
) -> Broken:
    class BrokenCollective(Collective):
        _table = table

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if self._said is not None:
                self._said = said(self.facts, self.config, self._incarnation)
            self.streams = {
                kind.purpose: kind(self.facts, self.config, self.rank, self._said)
                for kind in (hits, progress, State)
            }

    return Broken(Policy(name, BrokenCollective), rule)


class _SkipsWhatItLacks(Hits):
    def _vote(self) -> tuple[Tag, bytes] | None:
        ballot = self._table.ballot(self._ticket)
        if ballot is not None and ballot.settled:
            self._ticket += 1
            return self._vote()
        return super()._vote()


class _OwnBatches(Progress):
    def _over(self, tag: Tag, votes: Sequence[Reached]) -> bool:
        ballot = self._table.ballot(tag.ticket)
        return ballot is None or ballot.final or ballot.settled or ballot.done >= ballot.hit


class _OwnBatchesUntagged(_OwnBatches):
    def _compare(self, tags: dict[int, Tag]) -> None:
        pass


class _ForgetsWhatEnded(VoteTable):
    def close(self, ticket: TicketId) -> None:
        super().close(ticket)
        self._left.pop(ticket, None)


class _UnknownIsZero(VoteTable):
    def ballot(self, ticket: TicketId) -> Ballot | None:
        ballot = super().ballot(ticket)
        if ballot is not None and ballot.hit == UNLIMITED:
            return ballot._replace(hit=0)
        return ballot


class _SilenceAnswers(Said):
    def facts(self) -> list[Facts]:
        self._next = self._table.opened()[1]
        return super().facts()


BALLOTS = (
    _broken("skips votes", "a rank that takes no part in a ticket does not vote on it",
            hits=_SkipsWhatItLacks),
    _broken("votes at once", "a rank votes 0 until it knows its hit", table=_UnknownIsZero),
    _broken("own batches", "the number of votes is that of a rank's own batches",
            progress=_OwnBatches),
    _broken("own batches untagged", "the same, and votes are not told apart",
            progress=_OwnBatchesUntagged),
    _broken("forgets what ended", "a ticket that ended owes no votes", table=_ForgetsWhatEnded),
    _broken("silence answers", "a rank that has not voted yet has answered",
            said=_SilenceAnswers),
)  # fmt: skip
"""All of them."""
