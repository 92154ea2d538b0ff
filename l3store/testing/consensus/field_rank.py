"""One rank of a scenario of the field: a scheduler that follows its script, and what it saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from l3store.consensus.member import Member
from l3store.consensus.reports import Reports
from l3store.consensus.values import Consume, Grant, Release, Settle, Storage
from l3store.testing.consensus.field_calls import Calls, Memory
from l3store.testing.simulation.host import Host
from l3store.testing.simulation.world import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.consensus.agreement import Agreement
    from l3store.consensus.values import Effect, TicketId
    from l3store.testing.consensus.field_calls import Wait
    from l3store.testing.consensus.field_script import Input, Script

__all__ = ["Pages", "ScriptedRank", "Seen", "Way", "way_of"]


class Pages:
    """Host pages as numbers: a `Ledger` that evicts nothing."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self.cached = 0

    def take(self, ticket: TicketId, pages: int) -> bool:
        """Reserves pages, if so many are free."""
        if pages > self.free:
            return False
        self.free -= pages
        return True

    def settle(self, ticket: TicketId, pages: int) -> None:
        """Pages join the tree."""
        self.cached += pages

    def release(self, ticket: TicketId, pages: int) -> None:
        """Pages are free again."""
        self.free += pages


def _logical(capacity: int, clock: Callable[[], float]) -> Host:
    return Host(capacity, lambda slot: None)


@dataclass(frozen=True, slots=True)
class Way(Policy):
    """A policy of scripted ranks: it may also differ in the I/O side and in the machine."""

    agreement: type[Agreement] = Reports
    calls: type[Calls] = Calls
    member: type[Member] = Member
    shared_capacity: bool = True
    """Whether every rank counts with the MIN of the capacities, as after a join."""
    leaders_order: bool = True
    """Whether every rank gives its machine the inputs in the order of the leader."""
    tree: Callable[[int, Callable[[], float]], Host] = _logical
    """Makes a prefix tree; given its pages and the rank's wall clock."""


def way_of(policy: Policy) -> Way:
    """Returns a policy as scripted ranks use it: its agreement and its member."""
    if isinstance(policy, Way):
        return policy
    return Way(policy.name, policy.agreement, member=policy.engine.member_type)


@dataclass(slots=True)
class Seen:
    """What one rank saw. Tickets are called ``rid``, later attempts ``rid/attempt``."""

    rank: int
    steps: int = 0
    """That it has taken since L3 is on."""
    granted: dict[str, int] = field(default_factory=dict)
    """The hit that it schedules on."""
    settled: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    settled_in: dict[str, int] = field(default_factory=dict)
    """Number of the step, counted so."""
    settled_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the submit."""
    released_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the submit."""
    read: dict[str, int] = field(default_factory=dict)
    """Pages that were really read here."""
    consumed: dict[str, list[int]] = field(default_factory=dict)
    """Operations of each kind that have ended for all, in that order."""
    failed: dict[str, list[int]] = field(default_factory=dict)
    consumed_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the start to the last of a kind."""
    pins: int = 0
    """Operations that have not ended for all: their pages are pinned."""
    free: int = 0
    cached: int = 0
    memory: int = 0
    """Pages of this rank's own memory that are free."""
    held: int = 0
    """Pages in open tickets."""
    reused: bool = False
    writer_alive: bool = True
    value: object = None
    """What a scenario without requests is about."""
    error: str = ""
    """The exception that ended this rank or one of its threads."""


class ScriptedRank:
    """One rank: `turn` is one turn of its scheduler."""

    def __init__(
        self,
        script: Script,
        rank: int,
        agreement: Agreement,
        way: Way,
        wait: Wait,
        now: Callable[[], float],
    ) -> None:
        least = min(script.capacity_of(each) for each in range(script.ranks))
        own = script.capacity_of(rank)
        self.pages = Pages(least if way.shared_capacity else own)
        self.memory = Memory(own)
        self.member = way.member(agreement, self.pages)
        self.calls = way.calls(script, rank, agreement.facts, wait)
        self.seen = Seen(rank)
        self.agreement = agreement
        self.script, self.rank = script, rank
        self._now = now
        own_order = script.own_order or not way.leaders_order
        self._source = rank % 2 if own_order else 0
        self._first: int | None = None
        self._names: dict[TicketId, str] = {}
        self._since: dict[TicketId, float] = {}
        self._began = now()

    @property
    def done(self) -> bool:
        """Whether it has taken all steps of the script, or can go no further."""
        return self.seen.steps >= self.script.steps or bool(self.seen.error)

    def turn(self) -> bool:
        """Takes the next record, if it is here, then the inputs of its step."""
        if self.calls.died:
            self.seen.error = self.calls.died
            return False
        try:
            effects = self.member.poll()
            if effects is None:
                return False
            self._count(effects)
            self._carry_out(effects)
            for given in self.script.inputs:
                if given.step == self.seen.steps and given.rank in (None, self._source):
                    self._input(given)
        except (RuntimeError, IndexError) as error:
            self.seen.error = f"{type(error).__name__}: {error}"
            return False
        return True

    def end(self) -> Seen:
        """Returns what was seen, with the counters as they are now."""
        seen, machine = self.seen, self.member.machine
        seen.free, seen.cached, seen.memory = self.pages.free, self.pages.cached, self.memory.free
        seen.held, seen.reused = machine.occupancy, self.calls.reused
        seen.writer_alive = self.calls.writer_alive
        seen.pins = sum(len(ops.ended.missing(ops.issued)) for ops in machine.ops)
        seen.read = {_name(*label): pages for label, pages in self.calls.read_pages.items()}
        return seen

    def _count(self, effects: Sequence[Effect]) -> None:
        """Steps of a script begin when L3 is on: over a real link that takes a while."""
        number = self.member.machine.number
        if self._first is None and any(isinstance(each, Storage) for each in effects):
            self._first = number
        self.seen.steps = 0 if self._first is None else number - self._first

    def _input(self, given: Input) -> None:
        if given.what == "submit":
            span = given.span()
            ticket = self.member.submit(span)
            if ticket is not None:
                self._names[ticket] = _name(*span.label)
                self._since[ticket] = self._now()
                self.calls.query(ticket, span, self.memory)
        elif given.what == "abort":
            self._carry_out(self.member.abort(given.rid, given.attempt))
        elif given.what == "want":
            wanted = [t for t, name in self._names.items() if name == _name(given.rid)]
            self._carry_out([effect for t in wanted for effect in self.member.want(t)])
        elif given.what == "issue":
            self.calls.operate(given.kind, self.member.issue(given.kind))
        else:
            raise ValueError(f"no such input: {given}")

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        seen = self.seen
        for effect in effects:
            if isinstance(effect, Grant):
                seen.granted[self._names[effect.ticket]] = effect.pages
                self.calls.read(effect.ticket, effect.pages)
            elif isinstance(effect, Settle):
                self._settled(effect)
            elif isinstance(effect, Release):
                self.calls.given_back(effect.ticket)
                self.memory.give_back(effect.ticket, seen.settled[self._names[effect.ticket]])
                seen.released_s[self._names[effect.ticket]] = self._age(effect.ticket)
            elif isinstance(effect, Consume):
                kind = effect.kind.name.lower()
                seen.consumed.setdefault(kind, []).append(effect.op)
                seen.consumed_s[kind] = self._now() - self._began
                if not effect.ok:
                    seen.failed.setdefault(kind, []).append(effect.op)

    def _settled(self, effect: Settle) -> None:
        seen, name = self.seen, self._names[effect.ticket]
        seen.settled[name], seen.reasons[name] = effect.pages, effect.reason
        seen.settled_in[name] = seen.steps
        seen.settled_s[name] = self._age(effect.ticket)
        if not effect.granted:
            self.memory.give_back(effect.ticket)

    def _age(self, ticket: TicketId) -> float:
        return self._now() - self._since[ticket]


def _name(rid: str, attempt: int = 0) -> str:
    return f"{rid}/{attempt}" if attempt else rid
