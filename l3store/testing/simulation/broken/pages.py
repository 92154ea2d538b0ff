"""Faults of whoever holds host pages: the engine, its host memory and its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from l3store.consensus.values import Kind
from l3store.testing.simulation.broken.base import broken
from l3store.testing.simulation.engine import Engine
from l3store.testing.simulation.host import Host
from l3store.testing.simulation.reads import Read
from l3store.testing.simulation.storage import PROBE_S, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.consensus.values import Consume, OpId, Settle, TicketId
    from l3store.testing.simulation.host import Node, Slot
    from l3store.testing.simulation.plan import Page

__all__ = ["PAGES"]

BACK_S = 0.1
"""Seconds by which the wall clock of every second rank is set back, each `EVERY_S`."""
EVERY_S = 0.2


class _ReleasesAlone(Engine):
    def _settle(self, effect: Settle) -> None:
        super()._settle(effect)
        if effect.granted:
            reserved = self.host.tickets[effect.ticket]
            for slot in [slot for slot in reserved.slots if not self.storage.busy(slot)]:
                reserved.slots.remove(slot)
                self.host.give(slot)


class _StoredHere(Engine):
    def _consume(self, effect: Consume) -> None:
        self._here = self.storage.succeeded(effect.kind, effect.op)
        super()._consume(effect)

    def _succeeded(self, effect: Consume) -> bool:
        return self._here


class _WallClockHost(Host):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.clock: Callable[[], float] = float

    def tick(self) -> float:
        super().tick()
        return self.clock()


class _WallClock(Engine):
    host_type = _WallClockHost

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.host, _WallClockHost)
        self.host.clock = self._wall_clock

    def _wall_clock(self) -> float:
        now = self.storage._timeline.now
        return now - BACK_S * (now // EVERY_S) * (self.rank % 2)


class _RetryingRead(Read):
    def _overdue(self, first: int, last: int) -> None:
        storage = self._storage
        storage._ended(ok=False)
        storage._overdue(last - first)
        storage._timeline.after(storage._time(storage._plan.read_s), self._again, first, last)

    def _again(self, first: int, last: int) -> None:
        self._arrive(first, last, through=True, wrong=False)
        at_hand = self._storage.memory
        self._good.update(
            at for at in range(first, last) if at_hand[self._slots[at]] == self._pages[at]
        )
        if not self._stopped:
            self._say(self._run())
            if self._said == len(self._pages):
                self._stop()
            else:
                self._start_one()


class _Retries(Storage):
    read_type = _RetryingRead


class _CountingRead(Read):
    def _run(self) -> int:
        return len(self._good)


class _CountsBatches(Storage):
    read_type = _CountingRead


class _AcksAtDeadline(Storage):
    def _backup_overdue(self, op: OpId, pages: int) -> None:
        super()._backup_overdue(op, pages)
        self.facts.ack(Kind.BACKUP, op, ok=False)

    def _ack(self, kind: Kind, op: OpId, *, ok: bool) -> None:
        if op not in self.facts._acks[kind].ended:
            super()._ack(kind, op, ok=ok)


class _WaitsForQueries(Storage):
    def _no_answer(self, ticket: TicketId) -> None:
        self._ended(ok=False)


class _WaitingRead(Read):
    def _overdue(self, first: int, last: int) -> None:
        self._storage._ended(ok=False)
        self._storage._overdue(last - first)


class _WaitsForReads(Storage):
    read_type = _WaitingRead


class _FailsSilently(Storage):
    def _op_ended(self, kind: Kind, op: OpId, *, ok: bool) -> None:
        if ok:
            super()._op_ended(kind, op, ok=ok)


class _LosingHost(Host):
    def release(self, ticket: TicketId, pages: int) -> None:
        super().release(ticket, max(pages - 1, 0))


class _LosesPages(Engine):
    host_type = _LosingHost


class _TwiceGivingHost(Host):
    def settle(self, ticket: TicketId, pages: int) -> None:
        slots = self.tickets[ticket].slots[pages:]
        super().settle(ticket, pages)
        for slot in slots:
            if pages:
                self.give(slot)


class _GivesTwice(Engine):
    host_type = _TwiceGivingHost


class _HastyHost(Host):
    def match(self, pages: Sequence[Page]) -> int:
        for node in self.nodes.values():
            node.written = True
        return super().match(pages)


class _LoadsUnwritten(Engine):
    host_type = _HastyHost


class _MovesUnpinned(Engine):
    def _issue(self, kind: Kind, nodes: list[Node]) -> OpId:
        op = super()._issue(kind, nodes)
        self.host.pin([node.page for node in nodes], -1)
        return op

    def _consume(self, effect: Consume) -> None:
        self.host.pin([node.page for node in self._moving[effect.kind, effect.op]], 1)
        super()._consume(effect)


class _BacksUpAlways(Engine):
    def _may_back_up(self) -> bool:
        return True


class _SaysZero(Storage):
    def _say_hit(self, ticket: TicketId, count: int, ends: int | None) -> None:
        super()._say_hit(ticket, count * (self.rank != 1), ends)


class _VetoesFailures(Storage):
    def _ended(self, *, ok: bool) -> None:
        super()._ended(ok=ok)
        if not ok:
            self.facts.veto()
            self._timeline.after(PROBE_S, self._probe)


class _KeepsPins(Engine):
    def _settle(self, effect: Settle) -> None:
        live = self._by_ticket[effect.ticket]
        if effect.reason == "short":
            live.pinned = ()
        super()._settle(effect)


class _OtherKey(Storage):
    def backup(self, op: OpId, pages: Sequence[Page], slots: Sequence[Slot]) -> None:
        shifted = [*pages[1:], pages[0]] if self.rank == 1 else pages
        super().backup(op, shifted, slots)


PAGES = (
    broken("alone", "each rank frees the pages that no call of its own is in", 1,
           engine=_ReleasesAlone),
    broken("retries", "a read past its deadline is made again, into the same pages", 6,
           storage=_Retries),
    broken("stored here", "a page is stored if this rank's backup has succeeded", 9,
           engine=_StoredHere),
    broken("acks at deadline", "a backup has ended at its deadline", 10,
           storage=_AcksAtDeadline),
    broken("counts batches", "progress is the number of pages read, behind a hole, too", 16,
           storage=_CountsBatches),
    broken("waits for queries", "a query past its deadline says nothing",
           storage=_WaitsForQueries),
    broken("waits for reads", "a read past its deadline says nothing", storage=_WaitsForReads),
    broken("wall clock", "pages are evicted by a rank's own clock", engine=_WallClock),
    broken("loses pages", "a release gives one page less back", engine=_LosesPages),
    broken("gives twice", "a tail is given back by the settlement and by the release",
           engine=_GivesTwice),
    broken("loads unwritten", "pages are loaded before they were written",
           engine=_LoadsUnwritten),
    broken("moves unpinned", "pages that are copied or stored may be evicted",
           engine=_MovesUnpinned),
    broken("backs up always", "backups begin although L3 is off", engine=_BacksUpAlways),
    broken("says zero", "one rank says 0 to every query", storage=_SaysZero),
    broken("vetoes failures", "one failed call ends the epoch", storage=_VetoesFailures),
    broken("keeps pins", "a request that is revoked leaves its prefix pinned", engine=_KeepsPins),
    broken("other key", "one rank stores pages under keys of others", storage=_OtherKey),
    broken("fails silently", "a backup that fails is not acked", storage=_FailsSilently),
)  # fmt: skip
"""All of them."""
