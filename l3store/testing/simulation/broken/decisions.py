"""Faults of what decides: the replicated machine, and what it must not look at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from l3store.consensus.member import Member
from l3store.consensus.protocol import Machine, Phase
from l3store.consensus.values import Settle
from l3store.testing.simulation.broken.base import broken
from l3store.testing.simulation.engine import Engine

if TYPE_CHECKING:
    from l3store.consensus.protocol import Ticket
    from l3store.consensus.values import Config, Effect, Record, Span, TicketId

__all__ = ["DECISIONS"]


class _NoQuarantine(Machine):
    def _settle(self, ticket: Ticket, pages: int, reason: str, effects: list[Effect]) -> None:
        super()._settle(ticket, pages, reason, effects)
        if ticket.granted:
            self._release(ticket, effects)


class _LeaksOnAbort(Machine):
    def abort(self, rid: str, attempt: int = 0) -> list[Effect]:
        before = self.occupancy
        effects = super().abort(rid, attempt)
        self.occupancy = before
        return effects


class _ForgetsCancels(Machine):
    def abort(self, rid: str, attempt: int = 0) -> list[Effect]:
        effects = super().abort(rid, attempt)
        self._cancels.clear()
        return effects


class _SettlesAnyEnd(Machine):
    def _settle(self, ticket: Ticket, pages: int, reason: str, effects: list[Effect]) -> None:
        if ticket.granted and reason not in ("aborted", "short"):
            pages = min(ticket.bounds.done_low, ticket.granted)
        super()._settle(ticket, pages, reason, effects)


class _NeverOverdue(Machine):
    def _overdue(self, ticket: Ticket) -> bool:
        return False


class _OverdueSoon(Machine):
    def _overdue(self, ticket: Ticket) -> bool:
        return self.config.policy == "timeout" and self.now - ticket.since > 0.01


class _Unlimited(Machine):
    """Forgets a limit of its configuration."""

    forgotten: ClassVar[dict[str, Any]]

    def __init__(self, config: Config, ledger: Any) -> None:
        super().__init__(replace(config, **self.forgotten), ledger)


class _NoThreshold(_Unlimited):
    forgotten: ClassVar[dict[str, Any]] = {"threshold_pages": 1}


class _NoOccupancy(_Unlimited):
    forgotten: ClassVar[dict[str, Any]] = {"occupancy_pages": 1 << 31}


class _AlwaysBestEffort(Machine):
    def want(self, ticket: TicketId) -> list[Effect]:
        config = self.config
        self.config = replace(config, policy="best_effort")
        effects = super().want(ticket)
        self.config = config
        return effects


class _NeverWanted(Machine):
    def want(self, ticket: TicketId) -> list[Effect]:
        return []


class _ReadsOn(Machine):
    def _decide(self, ticket: Ticket, effects: list[Effect]) -> None:
        if self.storage_on or ticket.phase is Phase.SETTLED:
            super()._decide(ticket, effects)


class _GrantsAreNews(Machine):
    def _grant(self, ticket: Ticket, pages: int, effects: list[Effect]) -> None:
        super()._grant(ticket, pages, effects)
        if ticket.phase is Phase.READING:
            self._again.remove(ticket.id)


class _SettlementsAreNews(Machine):
    def _settle(self, ticket: Ticket, pages: int, reason: str, effects: list[Effect]) -> None:
        super()._settle(ticket, pages, reason, effects)
        if ticket.granted:
            self._again.remove(ticket.id)


class _ReusesIds(Machine):
    def submit(self, span: Span) -> TicketId | None:
        last = self.next_ticket
        self.next_ticket = next(n for n in range(last + 1) if n not in self.tickets)
        ticket = super().submit(span)
        self.next_ticket = max(last, self.next_ticket)
        return ticket


class _Local(Member):
    """Looks at what this rank alone knows."""

    def __init__(self, agreement: Any, ledger: Any) -> None:
        super().__init__(agreement, ledger)
        self.clock = agreement._clock


class _WantsOwnProgress(_Local):
    def want(self, ticket: TicketId) -> list[Effect]:
        own = self.facts._tickets.get(ticket)
        if self._agreement.rank == 0 and own and ticket in self.machine.tickets:
            open_one = self.machine.tickets[ticket]
            open_one.bounds = open_one.bounds._replace(done_low=own.done)
        return super().want(ticket)


class _OwnClock(_Local):
    def _apply(self, record: Record) -> list[Effect]:
        return super()._apply(replace(record, now=self.clock()))


class _RevokesAlone(_Local):
    def _apply(self, record: Record) -> list[Effect]:
        effects = super()._apply(record)
        least = self.machine.config.threshold_pages
        for ticket in list(self.machine.tickets.values()):
            own = self.facts._tickets.get(ticket.id)
            if own and ticket.phase is Phase.ASKING and own.hit < least:
                more: list[Effect] = []
                self.machine._settle(ticket, 0, "short", more)
                effects += self._note(more)
        return effects


class _TellsOtherwise(Member):
    def want(self, ticket: TicketId) -> list[Effect]:
        effects = super().want(ticket)
        if not self._agreement.rank:
            return effects
        return [e._replace(reason="complete") if isinstance(e, Settle) else e for e in effects]


class _InputsFirst(Engine):
    """A follower is given its inputs when they come, not after the record of their step."""

    def step(self) -> bool:
        if self.rank and self._given < self.member.machine.number + 1:
            self._given = self.member.machine.number + 1
            super()._inputs(self._given)
        return super().step()

    _given = 0

    def _inputs(self, step: int) -> None:
        if not self.rank:
            super()._inputs(step)


class _AbortsAlone(Engine):
    """A rank aborts when it hears of it, one step before the others."""

    def _inputs(self, step: int) -> None:
        for at, name in self._aborts:
            if at == step + 1 and self.rank == 1:
                self._abort(name)
        super()._inputs(step)


DECISIONS = (
    broken("no quarantine", "pages come back at the settlement", 1, machine=_NoQuarantine),
    broken("leaks on abort", "occupancy is not given back by an abort", machine=_LeaksOnAbort),
    broken("forgets cancels", "an abort that comes before its request is forgotten",
           machine=_ForgetsCancels),
    broken("any end", "a trailing pool settles where it has come to", machine=_SettlesAnyEnd),
    broken("never overdue", "no ticket ever times out", machine=_NeverOverdue),
    broken("overdue soon", "tickets time out too soon", machine=_OverdueSoon),
    broken("no threshold", "a hit below the threshold is downloaded", machine=_NoThreshold),
    broken("no occupancy", "tickets may hold any number of pages", machine=_NoOccupancy),
    broken("always best effort", "tickets settle when wanted, whatever the policy is",
           machine=_AlwaysBestEffort),
    broken("never wanted", "a request that is wanted goes on waiting", machine=_NeverWanted),
    broken("reads on", "open tickets go on when L3 is off", machine=_ReadsOn),
    broken("looks once at a grant", "a granted ticket is looked at when a rank says more of it",
           machine=_GrantsAreNews),
    broken("looks once at a settlement", "a settled ticket is looked at when a rank says more of "
           "it", machine=_SettlementsAreNews),
    broken("reuses ids", "the id of a ticket that ended is given again", machine=_ReusesIds),
    broken("own progress", "the leader schedules on its own progress", member=_WantsOwnProgress),
    broken("own clock", "each rank judges time-outs by its own clock", member=_OwnClock),
    broken("revokes alone", "each rank holds its own hit against the threshold",
           member=_RevokesAlone),
    broken("tells otherwise", "a rank's engine is told of another end than was decided",
           member=_TellsOtherwise),
    broken("inputs first", "inputs are applied before the record of their step", 14,
           engine=_InputsFirst),
    broken("aborts alone", "a rank aborts between its report and the record", 14,
           engine=_AbortsAlone),
)  # fmt: skip
"""All of them."""
