"""Faults of the leader: how it takes reports in, and how it meets them."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from l3store.consensus.meeting import Meeting, meet
from l3store.consensus.table import FactTable
from l3store.consensus.values import UNLIMITED, Acks, Bounds
from l3store.testing.simulation.broken.base import broken

if TYPE_CHECKING:
    from l3store.consensus.protocol import Machine, Ops, Ticket
    from l3store.consensus.values import Facts, Kind, Record, Row

__all__ = ["LEADER", "Unchecked"]


class Unchecked(FactTable):
    """Believes every record, so that a fault of the leader shows where it does harm."""

    def check(self, record: Record) -> None:
        """Does nothing."""


class _NewestByArrival(Meeting):
    def hear(self, facts: Facts) -> bool:
        self._heard[facts.rank].facts = None
        return super().hear(facts)


class _OneBound(Meeting):
    def _bounds(self, ticket: Ticket) -> Bounds:
        bounds = super()._bounds(ticket)
        return bounds._replace(hit_high=bounds.hit_low, done_high=bounds.done_low)


class _DoneTooSoon(Meeting):
    def _bounds(self, ticket: Ticket) -> Bounds:
        bounds = super()._bounds(ticket)
        return bounds._replace(done_high=bounds.done_low) if bounds.done_low else bounds


class _OtherThanMin(Meeting):
    """Meets the rows in another way than by MIN."""

    def _bounds(self, ticket: Ticket) -> Bounds:
        bounds = super()._bounds(ticket)
        rows = [heard.rows.get(ticket.id) for heard in self._heard]
        return self._mend(bounds, [row for row in rows if row is not None])

    def _mend(self, bounds: Bounds, rows: list[Row]) -> Bounds:
        raise NotImplementedError


class _Max(_OtherThanMin):
    def _mend(self, bounds: Bounds, rows: list[Row]) -> Bounds:
        hits = [row.hit for row in rows if row.hit != UNLIMITED]
        hit = max(hits, default=0)
        high = hit if len(hits) == len(self._heard) else UNLIMITED
        return bounds._replace(
            hit_low=hit, hit_high=high, done_low=max((row.done for row in rows), default=0)
        )


class _Own(_OtherThanMin):
    def _mend(self, bounds: Bounds, rows: list[Row]) -> Bounds:
        if not rows or rows[0].hit == UNLIMITED:
            return bounds
        own = rows[0]
        return bounds._replace(hit_low=own.hit, hit_high=own.hit, done_low=own.done)


class _OwnDone(_OtherThanMin):
    def _mend(self, bounds: Bounds, rows: list[Row]) -> Bounds:
        return bounds._replace(done_low=rows[0].done) if rows else bounds


class _QuietByOne(_OtherThanMin):
    def _mend(self, bounds: Bounds, rows: list[Row]) -> Bounds:
        return bounds._replace(quiet=any(row.quiet for row in rows))


class _EndsByOr(Meeting):
    def _bounds(self, ticket: Ticket) -> Bounds:
        bounds = super()._bounds(ticket)
        if not ticket.span.trailing or bounds.hit_low < bounds.hit_high or ticket.granted:
            return bounds
        return bounds._replace(ends=reduce(or_, [h.ends.get(ticket.id, 1) for h in self._heard]))


class _NoRowNoAnswer(Meeting):
    def _bounds(self, ticket: Ticket) -> Bounds:
        rows = [heard.rows.get(ticket.id) for heard in self._heard]
        return super()._bounds(ticket) if all(rows) else meet(rows)


class _AnswersEarly(Meeting):
    def _look(self, ticket: Ticket, rows: list[Row | None]) -> None:
        super()._look(replace(ticket, step=ticket.step - 1), rows)


class _NewUnseen(Meeting):
    def decide(self, machine: Machine, now: float) -> Record:
        self._met = machine.next_ticket
        return super().decide(machine, now)


class _LastTurn(Meeting):
    def hear(self, facts: Facts) -> bool:
        before = self._heard[facts.rank].facts
        newer = super().hear(facts)
        if newer and before is not None:
            self._turned = (facts.veto, facts.ready) != (before.veto, before.ready)
        return newer


class _SpansUnseen(Meeting):
    def _bounds(self, ticket: Ticket) -> Bounds:
        for heard in self._heard:
            row = heard.rows.get(ticket.id)
            if row is not None:
                heard.rows[ticket.id] = row._replace(span=ticket.span.digest)
        return super()._bounds(ticket)


class _StatesUnseen(Meeting):
    def _compare(self, machine: Machine) -> None:
        pass


class _NeverWaits(Meeting):
    def applied(self) -> int:
        return 1 << 62


class _ProbesAlone(Meeting):
    def _epoch(self, machine: Machine) -> tuple[int, bool]:
        own = self._heard[0].facts
        if not machine.storage_on and own is not None and own.ready > machine.epoch:
            return machine.epoch + 1, True
        return super()._epoch(machine)


class _UsableFlag(Meeting):
    def _epoch(self, machine: Machine) -> tuple[int, bool]:
        said = [heard.facts for heard in self._heard]
        usable = all(facts is not None and facts.ready > facts.veto for facts in said)
        return machine.epoch + (usable and not machine.storage_on), usable


class _OwnVetoes(Meeting):
    def _epoch(self, machine: Machine) -> tuple[int, bool]:
        epoch, on = super()._epoch(machine)
        own = self._heard[0].facts
        if machine.storage_on and not on and (own is None or own.veto < epoch):
            return machine.epoch, True
        return epoch, on


class _OwnAcks(Meeting):
    def _ended(self, kind: Kind, ops: Ops) -> Acks:
        own = self._heard[0].facts
        if own is None:
            return Acks()
        floor, above = own.acked[kind]
        ended = [*ops.ended.missing(floor), *sorted(op for op in above if op not in ops.ended)]
        return Acks(tuple(ended), own.failed[kind].intersection(ended))


class _OwnFailures(Meeting):
    def _ended(self, kind: Kind, ops: Ops) -> Acks:
        acks = super()._ended(kind, ops)
        own = self._heard[0].facts
        return acks._replace(failed=own.failed[kind].intersection(acks.ended)) if own else acks


LEADER = (
    broken("arrival", "the report that arrived last counts, not the newest", 7,
           meeting=_NewestByArrival),
    broken("one bound", "an unknown number is 0 for verdicts, too", 3, meeting=_OneBound),
    broken("done too soon", "progress so far is the last there will be", 3,
           meeting=_DoneTooSoon),
    broken("max", "MAX in place of MIN", table=Unchecked, meeting=_Max),
    broken("max refused", "MAX in place of MIN, and the ranks look", meeting=_Max),
    broken("own value", "the leader's own numbers in place of MIN", table=Unchecked, meeting=_Own),
    broken("own done", "the leader's own progress in place of MIN", table=Unchecked,
           meeting=_OwnDone),
    broken("quiet by one", "pages come back when one rank is quiet", 1, table=Unchecked,
           meeting=_QuietByOne),
    broken("ends by or", "an end point of one rank is one of all", table=Unchecked,
           meeting=_EndsByOr),
    broken("no row", "a rank without a row has not answered, for ever", 5,
           meeting=_NoRowNoAnswer),
    broken("answers early", "a rank without a row has answered when it has applied the record of "
           "the submit's step", 5, meeting=_AnswersEarly),
    broken("new unseen", "a ticket is looked at when a rank says something of it", 5,
           meeting=_NewUnseen),
    broken("last turn", "an epoch turns by the veto or the readiness that was heard last",
           meeting=_LastTurn),
    broken("spans unseen", "spans are not compared", 15, meeting=_SpansUnseen),
    broken("states unseen", "states are not compared", 15, meeting=_StatesUnseen),
    broken("unawaited", "records are sent without waiting for who is behind", meeting=_NeverWaits),
    broken("probes alone", "the leader alone probes", 12, meeting=_ProbesAlone),
    broken("usable flag", "usable is a flag, not the number of an epoch", 13,
           meeting=_UsableFlag),
    broken("own vetoes", "the leader's veto alone ends an epoch", meeting=_OwnVetoes),
    broken("own acks", "operations end when they have on the leader", 8, table=Unchecked,
           meeting=_OwnAcks),
    broken("own failures", "an operation failed if it did on the leader", 9,
           meeting=_OwnFailures),
)  # fmt: skip
"""All of them."""
