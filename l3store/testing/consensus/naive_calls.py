"""The I/O side as engines have it, one mistake a class; `field_calls.Calls` has the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.consensus.member import Member
from l3store.consensus.protocol import Machine
from l3store.testing.consensus.field_calls import Calls, Memory
from l3store.testing.consensus.field_script import NEVER
from l3store.testing.simulation.host import Host

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from l3store.consensus.values import Effect, Kind, OpId, Span, TicketId

__all__ = [
    "ByRequest",
    "DeadWriter",
    "ForgetfulMember",
    "KvAlone",
    "MinOfEnds",
    "NoDeadline",
    "NoReserve",
    "ReleasedAlone",
    "Unguarded",
    "WallClockTree",
]


class Unguarded(Calls):
    """An exception in a storage call ends the thread that made it, before its vote."""

    def query(self, ticket: TicketId, span: Span, memory: Memory) -> None:
        """Asks; one that raises says nothing."""
        self._labels[ticket] = span.label
        answer = self.answer(ticket)
        if answer.fails:
            self.wait(answer.after, self._die)
        else:
            super().query(ticket, span, memory)

    def _die(self) -> None:
        self.died = "ConnectionError: the store is unreachable"


class DeadWriter(Calls):
    """An exception in a backup ends the writer thread: what is queued behind it is never acked."""

    def operate(self, kind: Kind, op: OpId) -> None:
        """Begins an operation, if the writer lives."""
        if self.writer_alive:
            super().operate(kind, op)

    def raised(self, kind: Kind, op: OpId) -> None:
        """Nobody catches it."""
        self.writer_alive = False


class NoDeadline(Calls):
    """A storage call has no deadline: whoever waits for it waits as long as it hangs."""

    def query(self, ticket: TicketId, span: Span, memory: Memory) -> None:
        """Asks; one that hangs says nothing."""
        self._labels[ticket] = span.label
        if self.answer(ticket).after != NEVER:
            super().query(ticket, span, memory)

    def hanging(self, ticket: TicketId, pages: int, after: float) -> None:
        """A read that hangs ends when it returns."""
        if after != NEVER:
            self.wait(after, self._leave, ticket)
            self.wait(after, self.facts.finish, ticket)


class ReleasedAlone(Calls):
    """A read is given up at its deadline, and its pages are given back while it is in them."""

    def hanging(self, ticket: TicketId, pages: int, after: float) -> None:
        """A read that hangs has left, as far as the rank knows."""
        self.wait(self.deadline, self.facts.leave, ticket)
        self.wait(self.deadline, self.facts.finish, ticket)


class NoReserve(Calls):
    """Memory is looked for after the vote: a rank without room gives the request up alone."""

    def query(self, ticket: TicketId, span: Span, memory: Memory) -> None:
        """Asks what is stored, and nothing else."""
        self._labels[ticket] = span.label
        self._memory = memory
        self.wait(self.answer(ticket).after, self.answered, ticket, span)

    def read(self, ticket: TicketId, pages: int) -> None:
        """Reads, if there is room."""
        if self.answer(ticket).fits and self._memory.reserve(ticket, pages):
            super().read(ticket, pages)
        else:
            self.facts.finish(ticket)


class KvAlone(Calls):
    """Only kv is asked for: a sidecar that is shorter is found out by the model."""

    def answered(self, ticket: TicketId, span: Span) -> None:
        """The query is back."""
        self.facts.hit(ticket, min(self.answer(ticket).hit, span.pages))


class ByRequest(Calls):
    """Acks are looked up by request alone: an attempt meets those of the one before it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._newest: dict[str, TicketId] = {}
        self._got: dict[str, int] = {}

    def query(self, ticket: TicketId, span: Span, memory: Memory) -> None:
        """Asks, and remembers the request's newest ticket."""
        self._newest[span.rid] = ticket
        super().query(ticket, span, memory)

    def returned(self, ticket: TicketId, done: int, last: bool) -> None:
        """A read is back, of whichever attempt: the request has got so far."""
        label = self.label(ticket)
        self.read_pages[label] = done
        self._got[label[0]] = max(done, self._got.get(label[0], 0))
        self._leave(ticket)
        newest = self._newest[label[0]]
        self.facts.progress(newest, self._got[label[0]])
        self.facts.finish(newest)


class MinOfEnds(Calls):
    """Of a pool with end points only the last one is said, and they are met by MIN."""

    def answered(self, ticket: TicketId, span: Span) -> None:
        """The query is back."""
        (ends,) = self.answer(ticket).pools.values()
        last = max(ends) if isinstance(ends, frozenset) else ends
        self.facts.hit(ticket, last, (2 << last) - 1)


class Forgetful(Machine):
    """An abort of a request that has no ticket yet is forgotten."""

    def abort(self, rid: str, attempt: int = 0) -> list[Effect]:
        """Ends an attempt's ticket, if there is one."""
        return super().abort(rid, attempt) if (rid, attempt) in self._labels else []


class ForgetfulMember(Member):
    """A member whose machine is forgetful."""

    def __init__(self, agreement: Any, ledger: Any) -> None:
        super().__init__(agreement, ledger)
        self.machine = Forgetful(agreement.config, ledger)


class WallClockTree(Host):
    """A prefix tree whose nodes bear the time of their last use, by this rank's own clock."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        super().__init__(capacity, lambda slot: None)
        self._clock = clock

    def tick(self) -> float:
        """Returns the time."""
        return self._clock()
