"""Runs a plan: every rank's engine, storage and agreement over `LocalGroup`, in virtual time."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from l3store.consensus.collective import Collective
from l3store.consensus.local import LocalGroup, Timeline
from l3store.consensus.reports import Reports
from l3store.consensus.values import Kind
from l3store.errors import ConsensusError
from l3store.testing.simulation.checks import Checks
from l3store.testing.simulation.engine import Engine
from l3store.testing.simulation.storage import Storage

if TYPE_CHECKING:
    from l3store.consensus.agreement import Agreement
    from l3store.testing.simulation.plan import Plan

__all__ = ["Outcome", "Policy", "RankEnd", "World", "run"]

LONGEST = 30.0
"""Virtual seconds after which a run that has not ended hangs."""
MOST_VIOLATIONS = 100
"""At which even a run ends that is to go on."""
HISTORY = 30
"""Lines of a history."""
INCARNATION = 7


@dataclass(frozen=True, slots=True)
class Policy:
    """Which code the ranks of a run are made of. Ranks, stores and links are the same for all."""

    name: str
    agreement: type[Agreement] = Reports
    storage: type[Storage] = Storage
    engine: type[Engine] = Engine


@dataclass(frozen=True, slots=True)
class RankEnd:
    """Where one rank was when the run ended."""

    settled: tuple[tuple[str, int, str], ...]
    """(request, pages, reason) of its tickets, in order."""
    finished: tuple[str, ...]
    """Names of requests that ended, in order."""
    free: int
    """Host pages that are free."""
    cached: int
    """Host pages that are in the tree."""
    open: int
    """Tickets that hold pages."""
    occupancy: int
    """Pages in them."""
    stored: int = 0
    """Pages in the tree that are on L3, as far as this rank knows."""


@dataclass(slots=True)
class Outcome:
    """How a run went."""

    plan: Plan
    violations: list[str] = field(default_factory=list)
    refused: str = ""
    """The words of the ConsensusError that ended it."""
    met: Counter[str] = field(default_factory=Counter)
    """Kinds of faults, and how often each was met."""
    interleaving: int = 0
    """Stands for the order in which everything happened."""
    history: list[str] = field(default_factory=list)
    settled: list[tuple[str, int, str]] = field(default_factory=list)
    """Of rank 0: (request, pages, reason)."""
    ranks: list[RankEnd] = field(default_factory=list)
    switches: int = 0
    records: int = 0


class World:
    """One run.

    Args:
        plan: What happens.
        policy: Whose code the ranks run.
        to_the_end: Go on after a violation, to see what comes of it.
    """

    def __init__(self, plan: Plan, policy: Policy, *, to_the_end: bool = False) -> None:
        self.plan, self.policy = plan, policy
        self._most = MOST_VIOLATIONS if to_the_end else 1
        self.timeline = Timeline(plan.seed)
        ranks = plan.config.topology.ranks
        self.group = LocalGroup(self.timeline, ranks, plan.network)
        self.outcome = Outcome(plan)
        self._history: deque[str] = deque(maxlen=HISTORY)
        self._order = 0
        self._stop = False
        self._waiting: set[int] = set()
        self._reported = [float("-inf")] * ranks
        self.group.arrived = self._wake
        self.engines = [self._rank(rank) for rank in range(ranks)]
        self._checks = Checks(plan, self.engines, self.timeline.clock, self.wrong)
        self._lags = {
            (fault.rank, fault.number): fault.length for fault in plan.faults if fault.kind == "lag"
        }

    def _rank(self, rank: int) -> Engine:
        plan = self.plan
        link = self.group.links[rank]
        agreement = self.policy.agreement(
            link, plan.config, INCARNATION, plan.capacity, self.timeline.clock
        )
        storage = self.policy.storage(
            plan, rank, self.timeline, agreement.facts,
            lambda text: self.wrong(f"rank {rank}: {text}"),
        )  # fmt: skip
        self._exchange(rank, agreement)
        agreement.facts.ready()
        engine = self.policy.engine(plan, rank, agreement, storage)
        if plan.torn and rank and isinstance(agreement, Reports):
            engine.between = lambda: self._in_a_step(rank, agreement)
        if plan.ahead and not rank and isinstance(agreement, Reports):
            link.on_report(lambda: self._ahead(agreement))
            if plan.torn:
                engine.between = lambda: self._ahead(agreement)
        self.timeline.after(self.timeline.rng.uniform(0, plan.step_s), self._step, rank)
        return engine

    # -- events

    def _exchange(self, rank: int, agreement: Agreement) -> None:
        """Does what the threads of a real rank do for its agreement."""
        if isinstance(agreement, Collective):
            for stream in agreement.streams.values():
                self.group.hold(rank, stream, partial(self._refused, rank))
        elif rank and hasattr(agreement, "pump"):
            pause, _ = self._pump(rank, agreement)
            if isinstance(agreement, Reports):  # its thread also wakes up at each change
                pause = min(pause, self.plan.config.interval_s * self.timeline.rng.uniform(0.5, 1))
            self.timeline.after(max(pause, 1e-4), self._exchange, rank, agreement)

    def _pump(self, rank: int, agreement: Any) -> tuple[float, bool]:
        """A turn of a rank's reporting thread; returns the pause, and whether a report went out."""
        sent = self.group.sent[rank]
        pause: float = agreement.pump()
        if self.group.sent[rank] == sent:
            return pause, False
        since = self.timeline.now - self._reported[rank]
        if since < self.plan.config.interval_s * 0.999:
            self.wrong(f"rank {rank} reported {since:.4f} s after its last report")
        self._reported[rank] = self.timeline.now
        return pause, True

    def _in_a_step(self, rank: int, agreement: Reports) -> None:
        """The reporting thread does not wait for the inputs of a step to be given."""
        _, sent = self._pump(rank, agreement)
        self.outcome.met["report in a step"] += sent

    def _ahead(self, agreement: Reports) -> None:
        """Does what the thread of the leader's link does when a report has come."""
        self.outcome.met["report read ahead"] += agreement.decide_ahead()

    def _refused(self, rank: int, error: ConsensusError) -> None:
        self.outcome.refused = str(error)
        self.note(rank, f"ConsensusError: {error}")
        self._stop = True

    def _wake(self, rank: int) -> None:
        """Something has come in at a rank, which may wait for it."""
        if rank in self._waiting:
            self._waiting.remove(rank)
            self._step(rank)

    def _step(self, rank: int) -> None:
        engine, plan = self.engines[rank], self.plan
        try:
            stepped = engine.step()
        except ConsensusError as error:
            self._refused(rank, error)
            return
        except Exception as error:
            self.wrong(f"rank {rank} died of {error!r}")
            return
        if not stepped:
            self._waiting.add(rank)
            return
        number = engine.member.machine.number
        self._order = hash((self._order, rank, number, len(engine.effects)))
        for effect in engine.effects:
            self.note(rank, f"step {number}: {effect}")
        self._checks.step(engine)
        if engine.idle and not self._checks.unequal and self._all_over():
            self._stop = True
            return
        pause = plan.step_s * (5 if engine.idle else 1) * self.timeline.rng.uniform(0.8, 1.2)
        lag = self._lags.get((rank, number), 0.0)
        self.outcome.met["lag"] += lag > 0
        self.timeline.after(pause + lag, self._step, rank)

    def _all_over(self) -> bool:
        return all(
            each.idle and not each.storage.running and self._settled(each) for each in self.engines
        )

    def wrong(self, text: str) -> None:
        """Something that must never happen has happened."""
        self.outcome.violations.append(text)
        self._history.append(f"{self.timeline.now:8.4f}  VIOLATION {text}")
        self._stop = len(self.outcome.violations) >= self._most

    def note(self, rank: int, text: str) -> None:
        """A line of the history."""
        self._history.append(f"{self.timeline.now:8.4f}  rank {rank}: {text}")

    def _over(self) -> bool:
        return self._stop

    def _settled(self, engine: Engine) -> bool:
        machine = engine.member.machine
        stuck = [each.storage for each in self.engines]
        tickets = set(machine.tickets).difference(*([s.stuck_tickets for s in stuck]))
        if tickets:
            return False
        for kind in Kind:
            ops = machine.ops[kind]
            open_ones = set(ops.ended.missing(ops.issued))
            if open_ones.difference(*([s.stuck_backups for s in stuck if kind is Kind.BACKUP])):
                return False
        return True

    # -- all of it

    def run(self) -> Outcome:
        """Runs until every request has ended and every page is back, or something is wrong."""
        try:
            ended = self.timeline.run(LONGEST, self._over)
        except ConsensusError as error:
            ended = True
            self.outcome.refused = f"a call of a rank ended: {error}"
        if not ended and not self._checks.unequal:
            waiting = [engine.rank for engine in self.engines if not engine.idle]
            self.wrong(f"hangs: requests wait on ranks {waiting}" if waiting else "pages are kept")
        outcome, first = self.outcome, self.engines[0]
        outcome.met += self.group.met
        for engine in self.engines:
            outcome.met += engine.storage.met
        outcome.settled, outcome.switches = first.settled, first.switches
        outcome.records = first.member.machine.number
        outcome.interleaving = self._order
        outcome.ranks = [_end(engine) for engine in self.engines]
        if len(outcome.violations) < self._most:
            self._checks.end(outcome)
        outcome.history = list(self._history)
        return outcome


def _end(engine: Engine) -> RankEnd:
    machine, host = engine.member.machine, engine.host
    return RankEnd(
        tuple(engine.settled), tuple(engine.finished), len(host.free), len(host.nodes),
        len(machine.tickets), machine.occupancy, sum(n.stored for n in host.nodes.values()),
    )  # fmt: skip


def run(plan: Plan, policy: Policy, *, to_the_end: bool = False) -> Outcome:
    """Runs a plan with the code of a policy, up to a violation or, if asked, in spite of it."""
    return World(plan, policy, to_the_end=to_the_end).run()
