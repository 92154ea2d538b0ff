"""Plays a script in virtual time: every rank in one process, over `LocalGroup`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from l3store.consensus.collective import Collective
from l3store.consensus.local import LocalGroup, Network, Timeline
from l3store.consensus.reports import Reports
from l3store.testing.consensus.field_rank import ScriptedRank, Seen, way_of
from l3store.testing.consensus.naive_votes import Voting
from l3store.testing.simulation.plan import Plan
from l3store.testing.simulation.world import INCARNATION, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.consensus.agreement import Agreement
    from l3store.errors import ConsensusError
    from l3store.testing.consensus.field_script import Script
    from l3store.testing.simulation.world import Policy

__all__ = ["Told", "play"]

PATIENCE_S = 10.0
"""Virtual seconds after the last step of a script at which a group that has not ended hangs."""
FRAME = Network(quick=(0.001, 0.001))


@dataclass(slots=True)
class Told(Outcome):
    """How a script went."""

    seen: list[Seen] = field(default_factory=list)
    """By rank."""
    hangs: list[int] = field(default_factory=list)
    """Ranks that could not go on, and had no error."""
    pairs: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    """Of naive votes: what each rank voted on, by group and position."""


class Stage:
    """One run of a script."""

    def __init__(
        self,
        script: Script,
        policy: Policy,
        wire: Callable[[LocalGroup], None] = lambda group: None,
    ) -> None:
        self.script, self.way = script, way_of(policy)
        self.timeline = Timeline(1)
        self.config = script.config()
        self.group = LocalGroup(self.timeline, script.ranks, FRAME)
        self.group.arrived = self._wake
        wire(self.group)
        self.told = Told(Plan(1, self.config, ()))
        self._waiting: set[int] = set()
        self.ranks = [self._rank(rank) for rank in range(script.ranks)]

    def _rank(self, number: int) -> ScriptedRank:
        script, timeline = self.script, self.timeline
        rate = script.rates[number] if number < len(script.rates) else 1.0
        least = min(script.capacity)
        agreement = self.way.agreement(
            self.group.links[number], self.config, INCARNATION, least,
            lambda: timeline.now * rate,
        )  # fmt: skip
        self._exchange(number, agreement)
        agreement.facts.ready()
        rank = ScriptedRank(script, number, agreement, self.way, timeline.after, timeline.clock)
        timeline.after(0.0, self._turn, number)
        return rank

    def _exchange(self, rank: int, agreement: Agreement) -> None:
        """Does what the threads of a real rank do for its agreement."""
        if isinstance(agreement, Collective):
            for stream in agreement.streams.values():
                self.group.hold(rank, stream, partial(self._refused, rank))
        elif isinstance(agreement, Voting):
            agreement.begin(partial(self._vote, rank), self.timeline.after)
        elif hasattr(agreement, "pump") and (rank or not isinstance(agreement, Reports)):
            agreement.pump()
            self.timeline.after(self.config.interval_s, self._exchange, rank, agreement)

    def _refused(self, rank: int, error: ConsensusError) -> None:
        self.ranks[rank].seen.error = f"{type(error).__name__}: {error}"

    def _vote(self, rank: int, group: str, frame: bytes, take: Callable[[bytes], None]) -> None:
        self.group.vote(group, rank, frame, lambda frames: take(min(frames, key=_value)))

    def _wake(self, rank: int) -> None:
        if rank in self._waiting:
            self._waiting.remove(rank)
            self._turn(rank)

    def _turn(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.turn():
            self.timeline.after(self.script.step_s, self._turn, number)
        elif not rank.seen.error:
            self._waiting.add(number)

    def run(self) -> Told:
        """Runs until every rank has ended, or one has refused, or nobody can go on."""
        told, script = self.told, self.script
        until = script.steps * script.step_s + PATIENCE_S
        ended = self.timeline.run(until, lambda: all(rank.done for rank in self.ranks))
        told.seen = [rank.end() for rank in self.ranks]
        told.refused = next(
            (each.error for each in told.seen if each.error.startswith("ConsensusError")), ""
        )
        if not ended:
            told.hangs = [rank.rank for rank in self.ranks if not rank.done]
            told.violations.append(f"ranks {told.hangs} cannot go on")
        told.violations += [
            f"rank {each.rank} ended: {each.error}"
            for each in told.seen
            if each.error and not each.error.startswith("ConsensusError")
        ]
        told.history = [str(each) for each in told.seen]
        voting = [rank.agreement for rank in self.ranks if isinstance(rank.agreement, Voting)]
        for group in sorted({group for each in voting for group in each.made}):
            made = [each.made.get(group, []) for each in voting]
            told.pairs[group] = list(zip(*made, strict=False))
        return told


def _value(frame: bytes) -> int:
    return int.from_bytes(frame, "little", signed=True)


def play(script: Script) -> Callable[[Policy], Outcome]:
    """Returns what runs a script with the code of a policy."""
    return lambda policy: Stage(script, policy).run()
