"""Faults of a rank's facts: what it says of itself, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from l3store.consensus.meeting import Meeting
from l3store.consensus.reports import Reports
from l3store.consensus.table import FactTable, _Open
from l3store.consensus.wire import encode_facts
from l3store.testing.simulation.broken.base import broken
from l3store.testing.simulation.broken.leader import Unchecked
from l3store.testing.simulation.storage import Storage

if TYPE_CHECKING:
    from l3store.consensus.values import Facts, Kind, OpId, Row, Span, TicketId

__all__ = ["FACTS"]


class _QuietAtSettlement(FactTable):
    def settle(self, ticket: TicketId) -> None:
        super().settle(ticket)
        if ticket in self._tickets:
            self._tickets[ticket].calls = 0

    def leave(self, ticket: TicketId) -> None:
        if ticket in self._tickets and self._tickets[ticket].calls:
            super().leave(ticket)


class _QuietUntilItReads(_Open):
    def row(self, ticket: TicketId) -> Row:
        return super().row(ticket)._replace(quiet=not self.calls)


class _QuietEarly(Unchecked):
    def open(self, ticket: TicketId, span: Span) -> None:
        super().open(ticket, span)
        self._tickets[ticket] = _QuietUntilItReads(span, self._applied)


class _TakesBack(Meeting):
    def hear(self, facts: Facts) -> bool:
        heard = self._heard[facts.rank]
        if heard.facts is None or facts.seq > heard.facts.seq:
            for row in facts.rows:
                heard.rows.pop(row[0], None)
            heard.facts = None
        return super().hear(facts)


class _ReadsAfterQuiet(FactTable):
    def progress(self, ticket: TicketId, pages: int, groups: int = 0) -> None:
        row = self._tickets.get(ticket)
        if row is None or not row.settled or (not row.final and row.calls):
            super().progress(ticket, pages, groups)
        elif not row.final:
            with self._changing(ticket):
                row.done, row.groups = pages, groups


class _ReadsAfterDeclining(FactTable):
    def progress(self, ticket: TicketId, pages: int, groups: int = 0) -> None:
        row = self._tickets.get(ticket)
        if row is None or not (row.settled and row.final):
            super().progress(ticket, pages, groups)
        else:
            with self._changing(ticket):
                row.done, row.groups = pages, groups


class _DeclineForgets(FactTable):
    def decline(self, ticket: TicketId) -> None:
        with self._changing(ticket):
            self._tickets.pop(ticket, None)


class _DeclineUnsettled(FactTable):
    def decline(self, ticket: TicketId) -> None:
        if ticket in self._tickets:
            self.finish(ticket)


class _EntersLate(FactTable):
    def enter(self, ticket: TicketId) -> bool:
        row = self._tickets.get(ticket)
        if row is None or not row.settled:
            return super().enter(ticket)
        row.calls += 1
        return True


class _SucceedsAlways(FactTable):
    def ack(self, kind: Kind, op: OpId, *, ok: bool = True) -> None:
        super().ack(kind, op)


class _CountsBackups(FactTable):
    def ack(self, kind: Kind, op: OpId, *, ok: bool = True) -> None:
        super().ack(kind, self._acks[kind].ended.floor, ok=ok)


class _FloorAlone(FactTable):
    def facts(self) -> Facts:
        facts = super().facts()
        return replace(facts, acked=tuple((floor, frozenset()) for floor, _ in facts.acked))


class _KeepsRows(FactTable):
    def close(self, ticket: TicketId) -> None:
        self.settle(ticket)


class _KeepsFailures(FactTable):
    def consumed(self, kind: Kind, op: OpId) -> None:
        pass


class _LateUnsaid(FactTable):
    def late(self, pages: int) -> None:
        self._late_pages += pages


class _LateToTheTable(Storage):
    def _veto_late(self) -> None:
        pass


class _ReadyAtOnce(FactTable):
    def _offer(self) -> None:
        if not self._storage_on:
            self._ready = max(self._epoch, self._veto) + 1


class _VetoUnsaid(FactTable):
    def _veto_now(self) -> None:
        pass


class _FloorForgives(FactTable):
    def ack(self, kind: Kind, op: OpId, *, ok: bool = True) -> None:
        super().ack(kind, op, ok=ok)
        acks = self._acks[kind]
        if op < acks.ended.floor - 1:
            acks.failed = {failed for failed in acks.failed if failed >= acks.ended.floor}


class _FloorForgets(FactTable):
    def ack(self, kind: Kind, op: OpId, *, ok: bool = True) -> None:
        floor = self._acks[kind].ended.floor
        super().ack(kind, op, ok=ok)
        if op == floor:
            self._acks[kind].said.clear()


class _SaysOnce(Reports):
    def pump(self) -> float:
        if self.facts.version == self._sent:
            return self.config.heartbeat_s
        return super().pump()


class _SaysAllAtOnce(Reports):
    def pump(self) -> float:
        self._link.report(encode_facts(self.facts.facts()))
        return 0.0


FACTS = (
    broken("quiet at settlement", "quiet is said at the settlement, although calls run", 2,
           table=_QuietAtSettlement),
    broken("quiet early", "quiet is said before the grant was applied", 2,
           table=_QuietEarly, meeting=_TakesBack),
    broken("reads after quiet", "progress counts that is said when quiet was said", 2,
           table=_ReadsAfterQuiet),
    broken("reads after declining", "progress counts that is said when a rank has declined", 2,
           table=_ReadsAfterDeclining),
    broken("decline forgets", "a rank that declines takes back what it has said",
           table=_DeclineForgets),
    broken("decline goes on", "a call may begin on a rank that has declined",
           table=_DeclineUnsettled),
    broken("enters late", "a call may begin after the settlement", 2, table=_EntersLate),
    broken("succeeds always", "an operation that failed has ended well", 9,
           table=_SucceedsAlways),
    broken("counts backups", "a rank says how many backups have ended, not which", 8,
           table=_CountsBackups),
    broken("floor alone", "backups end in the order of issue", 11, table=_FloorAlone),
    broken("keeps rows", "a ticket that ended is told for ever", table=_KeepsRows),
    broken("keeps failures", "an operation that ended is told for ever", table=_KeepsFailures),
    broken("late unsaid", "pages under late calls veto nothing", 11, table=_LateUnsaid,
           storage=_LateToTheTable),
    broken("ready at once", "a rank is ready although its path is not", 12, table=_ReadyAtOnce),
    broken("veto unsaid", "a rank keeps its outage to itself", table=_VetoUnsaid),
    broken("floor forgives", "a floor that moves takes all failures below it along", 9,
           table=_FloorForgives),
    broken("floor forgets", "a floor that moves takes all acks above it along", 11,
           table=_FloorForgets),
    broken("says once", "a report goes out when something has changed, and not again", 4,
           reports=_SaysOnce),
    broken("chatters", "a report goes out at each turn", reports=_SaysAllAtOnce),
)  # fmt: skip
"""All of them."""
