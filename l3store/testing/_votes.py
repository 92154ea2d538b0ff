"""Orders of votes: the streams of all ranks of a group, driven in every order that chance finds.

What a rank does is in actions; any of those that can happen now may be the next one. So a rank may
apply a record long after the others, answer first or last, fail, give up, or sit in a gather while
the others are tickets behind. No link, machine or clock: only who votes on what, and when.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from l3store.consensus.values import Config, Span, Topology
from l3store.consensus.votes import VoteTable
from l3store.errors import ConsensusError
from l3store.testing._vote_habits import RIGHT, Habits, HabitualHits, HabitualProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.consensus.values import Facts, TicketId
    from l3store.consensus.votes import Stream

__all__ = ["RIGHT", "Habits", "Outcome", "run", "tally"]

MAX_PAGES = 12
CONFIGS = {
    ranks: Config(Topology(ranks, tp=ranks), batch_pages=2, max_pages=MAX_PAGES)
    for ranks in (2, 3, 4)
}


class Outcome(NamedTuple):
    """What became of one seed."""

    kind: str
    """right; slip: a `ConsensusError`; hang: nobody can go on; wrong: numbers of different things
    were met, and nobody has noticed."""
    detail: str
    rounds: int
    """In which all ranks have voted."""


@dataclass(slots=True)
class _Truth:
    """What one rank has for one ticket, whatever anybody votes."""

    hit: int
    """That its query will find."""
    limit: int = 0
    """Pages that it will read."""
    done: int = 0
    hangs: bool = False
    """Its read ends only some time after the ticket was settled."""
    inside: bool = False
    """A call is in pages of the ticket."""
    settled: bool = False


class _Rank:
    """One rank: its table, its streams, and what it has heard of the others' votes."""

    def __init__(self, run: _Run, rank: int, habits: Habits) -> None:
        self.run, self.rank = run, rank
        self.table = VoteTable(run.config, rank, 1)
        hits = HabitualHits(self.table, run.config, rank, self)
        progress = HabitualProgress(self.table, run.config, rank, self)
        hits.habits = progress.habits = habits
        self.streams: tuple[Stream, ...] = (hits, progress)
        self.applied = 0
        self.truths: dict[TicketId, _Truth] = {}
        self.hits: list[tuple[int, TicketId, int]] = []
        self.reached: list[tuple[int, TicketId, int, bool]] = []

    # -- as a listener

    def hit(self, rank: int, ticket: TicketId, span: int, pages: int, ends: int) -> None:
        """A vote was heard: it must be what the rank has found for that ticket."""
        self.hits.append((rank, ticket, pages))
        truth = self.run.ranks[rank].truths.get(ticket)
        found = truth.hit if truth is not None else None
        if pages != found and (found is None or pages or ticket not in self.run.aborted):
            self.run.wrong(f"rank {rank} has {truth} of ticket {ticket}, and hit {pages} was heard")
        ranks = len(self.run.ranks)
        if self.rank == 0 and rank == ranks - 1:
            self.run.hits_known(ticket, min(heard for _, _, heard in self.hits[-ranks:]))

    def progress(self, rank: int, ticket: TicketId, done: int, groups: int, final: bool) -> None:
        """A vote was heard: it must be what the rank has read, or had when it voted."""
        self.reached.append((rank, ticket, done, final))
        truth = self.run.ranks[rank].truths.get(ticket)
        if truth is None or done > truth.done or (final and done != truth.done):
            self.run.wrong(f"rank {rank} has {truth} of ticket {ticket}, and {done} was heard")
        ranks = len(self.run.ranks)
        if self.rank == 0 and rank == ranks - 1:
            self.run.progress_known(ticket, self.reached[-ranks:])

    def state(self, facts: Facts) -> None:
        """Nobody tells a state here."""
        self.run.wrong(f"rank {facts.rank} has told a state")


class _Run:
    """One seed."""

    def __init__(self, seed: int, habits: Habits) -> None:
        self.rng = Random(seed)
        ranks = self.rng.choice((2, 2, 3, 4))
        self.config = CONFIGS[ranks]
        self.ranks = [_Rank(self, rank, habits) for rank in range(ranks)]
        self.rounds = 0
        self.aborted: set[TicketId] = set()
        self._ready: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._log: list[tuple[str, TicketId, int]] = []
        self._spans = [
            # without tags nothing says what a vote is on, the digest of the span neither
            Span("r" if not habits.tags else f"r{ticket}", 0, 0, MAX_PAGES, b"tail")
            for ticket in range(self.rng.randint(1, 6))
        ]
        self._granted: dict[TicketId, int] = {}
        self._settled: set[TicketId] = set()
        self._closed: set[TicketId] = set()
        self._gathers: list[dict[int, bytes]] = [{}, {}]
        self._parked = [[True, True] for _ in range(ranks)]
        self._wrong = ""
        self._fits = self.rng.random() < 0.6  # memory is there on every rank

    def outcome(self) -> Outcome:
        """Lets everything happen that can."""
        for ticket in range(len(self._spans)):
            self._soon(self._submit, ticket)
        ready, rng = self._ready, self.rng
        try:
            while ready and not self._wrong:
                at = int(rng.random() * len(ready))
                ready[at], ready[-1] = ready[-1], ready[at]
                action, args = ready.pop()
                action(*args)
        except ConsensusError as error:
            return Outcome("slip", str(error), self.rounds)
        if self._wrong:
            return Outcome("wrong", self._wrong, self.rounds)
        if not self._ended():
            waiting = [sorted(gather) for gather in self._gathers]
            return Outcome("hang", f"ranks that wait, by purpose: {waiting}", self.rounds)
        first = self.ranks[0]
        if any((rank.hits, rank.reached) != (first.hits, first.reached) for rank in self.ranks):
            return Outcome("wrong", "the ranks have heard different votes", self.rounds)
        return Outcome("right", "", self.rounds)

    def wrong(self, text: str) -> None:
        """Numbers of different things were met."""
        self._wrong = self._wrong or text

    def _ended(self) -> bool:
        """Whether every ticket has ended on every rank, and no vote is owed."""
        return len(self._closed) == len(self._spans) and not any(
            rank.applied < len(self._log) or rank.table._left or rank.table.grant() is not None
            for rank in self.ranks
        )

    def _soon(self, action: Callable[..., None], *args: object) -> None:
        self._ready.append((action, args))

    # -- what all do: a log that each rank applies when it comes to it

    def _say(self, what: str, ticket: TicketId, pages: int = 0) -> None:
        self._log.append((what, ticket, pages))
        for rank in self.ranks:
            self._soon(self._apply, rank)

    def _submit(self, _: TicketId) -> None:
        self._say("open", sum(entry[0] == "open" for entry in self._log))
        if self.rng.random() < 0.2:
            self._soon(self._abort, self._log[-1][1])

    def _abort(self, ticket: TicketId) -> None:
        if ticket not in self._settled and ticket not in self._closed:
            self.aborted.add(ticket)
            self._end(ticket)

    def _end(self, ticket: TicketId) -> None:
        if ticket in self._granted:
            self._settled.add(ticket)
            self._say("settle", ticket)
        else:
            self._closed.add(ticket)
            self._say("close", ticket)

    def hits_known(self, ticket: TicketId, agreed: int) -> None:
        """The leader has all hits."""
        if ticket in self._closed or ticket in self._granted:
            return
        if agreed == 0:
            self._end(ticket)
        else:
            self._granted[ticket] = agreed
            self._say("grant", ticket, agreed)
            if self.rng.random() < 0.15:
                self._soon(self._abort, ticket)

    def progress_known(
        self, ticket: TicketId, votes: Sequence[tuple[int, TicketId, int, bool]]
    ) -> None:
        """The leader has a round of progress."""
        if ticket in self._settled or ticket not in self._granted:
            return
        done = min(reached for _, _, reached, _ in votes)
        final = [reached for _, _, reached, ended in votes if ended]
        if done >= min(self._granted[ticket], *final, MAX_PAGES):
            limits = [rank.truths[ticket].limit for rank in self.ranks]
            if done != min(limits):
                self.wrong(f"ticket {ticket} settles at {done}; the ranks can read {limits}")
            self._end(ticket)

    # -- what one rank does

    def _apply(self, rank: _Rank) -> None:
        what, ticket, pages = self._log[rank.applied]
        rank.applied += 1
        if what == "open":
            rank.table.open(ticket, self._spans[ticket])
            found = 0 if self.rng.random() < 0.15 else self.rng.randint(1, MAX_PAGES)
            rank.truths[ticket] = _Truth(found)
            self._soon(self._answer, rank, ticket)
        elif what == "grant":
            rank.table.granted(ticket, pages)
            self._begin(rank, ticket, pages)
        elif what == "settle":
            rank.table.settle(ticket)
            truth = rank.truths[ticket]
            truth.settled = True
            if truth.inside and truth.hangs:
                self._soon(self._leave, rank, ticket)
            self._close_if_quiet(ticket)
        else:
            rank.table.close(ticket)
        self._look(rank)

    def _answer(self, rank: _Rank, ticket: TicketId) -> None:
        truth = rank.truths[ticket]
        if truth.hit:
            rank.table.hit(ticket, truth.hit)
        else:
            rank.table.finish(ticket)  # the query has failed
        self._look(rank)

    def _begin(self, rank: _Rank, ticket: TicketId, pages: int) -> None:
        truth, chance = rank.truths[ticket], self.rng.random()
        truth.limit = pages
        if not self._fits and chance < 0.3:
            truth.limit = 0  # no memory here
        elif chance < 0.5:
            truth.limit = self.rng.randint(0, pages)
        truth.hangs = chance > 0.95
        if truth.hangs:
            self._soon(self._abort, ticket)
        truth.inside = rank.table.enter(ticket)
        self._soon(self._read, rank, ticket)

    def _read(self, rank: _Rank, ticket: TicketId) -> None:
        truth = rank.truths[ticket]
        if truth.done < truth.limit and not truth.settled:
            truth.done = self.rng.randint(truth.done + 1, truth.limit)
            rank.table.progress(ticket, truth.done)
            self._soon(self._read, rank, ticket)
        elif not truth.hangs:
            rank.table.finish(ticket)
            self._leave(rank, ticket)
        self._look(rank)

    def _leave(self, rank: _Rank, ticket: TicketId) -> None:
        rank.table.leave(ticket)
        rank.truths[ticket].inside = False
        self._close_if_quiet(ticket)
        self._look(rank)

    def _close_if_quiet(self, ticket: TicketId) -> None:
        truths = [rank.truths.get(ticket) for rank in self.ranks]
        if all(truth and truth.settled and not truth.inside for truth in truths):
            self._closed.add(ticket)
            self._say("close", ticket)

    # -- votes

    def _look(self, rank: _Rank) -> None:
        """Something has changed on a rank: its streams that wait for that look again."""
        for which, parked in enumerate(self._parked[rank.rank]):
            if parked:
                self._parked[rank.rank][which] = False
                self._soon(self._vote, rank, which)

    def _vote(self, rank: _Rank, which: int) -> None:
        frame = rank.streams[which].next()
        if frame is None:
            if self._gathers[which] and self.rng.random() < 0.1:
                frame = rank.streams[which].idle()
            else:
                self._parked[rank.rank][which] = True
                return
        gather = self._gathers[which]
        gather[rank.rank] = frame
        if len(gather) == len(self.ranks):
            frames = [gather[each] for each in range(len(self.ranks))]
            self._gathers[which] = {}
            self.rounds += 1
            for each in self.ranks:
                self._soon(self._take, each, which, frames)

    def _take(self, rank: _Rank, which: int, frames: list[bytes]) -> None:
        rank.streams[which].take(frames)
        self._vote(rank, which)


def run(seed: int, habits: Habits = RIGHT) -> Outcome:
    """Runs one seed: a group of 2 to 4 ranks with 1 to 6 tickets; always the same for a seed."""
    return _Run(seed, habits).outcome()


def tally(seeds: range, habits: Habits = RIGHT) -> tuple[Counter[str], dict[str, str]]:
    """Returns how many seeds became what, and one of each: its seed and what is to be said."""
    kinds: Counter[str] = Counter()
    told: dict[str, str] = {}
    for seed in seeds:
        outcome = run(seed, habits)
        kinds[outcome.kind] += 1
        told.setdefault(outcome.kind, f"seed {seed}: {outcome.detail}")
    return kinds, told
