"""Everything that decides, once: the replicated state machine of a group.

No clock, thread or I/O, and nothing local. A `Machine` changes by step inputs (`submit`, `abort`,
`want`, `issue`: the engine gives every rank the same ones in the same order) and by records. What a
rank has physically reached goes to the leader's `Meeting` as `Facts`; what all have reached comes
back in a `Record`. So machines that began alike stay alike, and a digest of their steps tells if
they did not.

Rules, by the number of the history that breaks without them (docs/consensus.md tells each):

1.  Reserved pages come back by `Release`, when every rank is quiet, never by a rank alone.
2.  Quiet is said after the settlement was applied, and no fact goes back.
3.  An unknown number is 0 for use and unlimited for verdicts: two bounds.
5.  A rank without a row that has applied a record later than the submit has answered: 0, quiet.
7.  Of a rank's reports only the newest counts.
8.  Operations are numbered alike on all ranks; device acks are a floor, storage acks a set.
9.  An operation succeeded if it did on every rank.
12. A new epoch begins when every rank is ready for it.
13. Veto and ready are numbers of epochs.
14. Record k is applied before the inputs of step k.
15. Spans and states are compared, and a difference stops the group by name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter
from struct import Struct
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

from l3store.consensus.values import (
    NO_ACKS,
    Bounds,
    Consume,
    Grant,
    Kind,
    Release,
    Settle,
    Storage,
)
from l3store.errors import ConfigError, ConsensusError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from l3store.consensus.values import Acks, Config, Effect, OpId, Record, Span, TicketId

__all__ = ["Ended", "Ledger", "Machine", "Ops", "Phase", "Ticket"]

CANCELS_KEPT = 4096
"""Aborts that came before their request; the oldest is forgotten."""
_STEP = Struct("<BQqqL")
_SUBMIT, _ABORT, _WANT, _ISSUE, _WITNESS, _APPLY, _CONSUME, _GRANT, _SETTLE, _RELEASE = range(10)


class Ledger(Protocol):
    """The host pages of the group, counted alike on every rank: a part of the replicated state.

    Only the machine calls it, on the thread that steps. An answer may depend on earlier calls and
    on the engine's step inputs alone: never on a clock, on memory or on calls that run.
    """

    def take(self, ticket: TicketId, pages: int) -> bool:
        """Reserves `pages` pages for a ticket, evicting in logical order; False: none."""
        ...

    def settle(self, ticket: TicketId, pages: int) -> None:
        """The first `pages` reserved pages of a ticket are the prefix tree's now."""
        ...

    def release(self, ticket: TicketId, pages: int) -> None:
        """The last `pages` reserved pages of a ticket are free."""
        ...


class Phase(Enum):
    """Where a ticket is. It only goes down this list."""

    ASKING = "asking"
    """Ranks look what is stored; no page is held."""
    READING = "reading"
    """`Ticket.granted` pages are reserved, and ranks read into them."""
    SETTLED = "settled"
    """Decided; its tail is reserved until every rank is quiet."""


@dataclass(slots=True)
class Ticket:
    """One prefetch of one request attempt, from its submit to its last page."""

    id: TicketId
    span: Span
    step: int
    """Number of the record after which it was submitted."""
    since: float
    """The leader's clock in that record, seconds."""
    phase: Phase = Phase.ASKING
    bounds: Bounds = field(default_factory=Bounds)
    granted: int = 0
    settled: int = 0

    @property
    def held(self) -> int:
        """Pages that count against `Config.occupancy_pages`."""
        if self.phase is Phase.ASKING:
            return self.span.pages
        return self.granted - self.settled

    def end(self) -> int:
        """Returns the pages that every rank can read, once the hit is agreed."""
        bounds = self.bounds
        if not self.span.trailing:
            return min(bounds.hit_low, self.span.pages)
        legal = bounds.ends & ((1 << (min(bounds.hit_low, self.span.pages) + 1)) - 1)
        return max(legal.bit_length() - 1, 0)

    def complete(self) -> bool:
        """Whether waiting would bring no further page."""
        return self.bounds.done_low >= min(self.granted, self.bounds.done_high)

    def usable(self) -> int:
        """Returns the pages that every rank has read: a prefix, or with trailing pools all."""
        done = min(self.bounds.done_low, self.granted)
        return done if done == self.granted or not self.span.trailing else 0


class Ended:
    """Numbers that have ended, in any order: all below a floor, and runs of them above it.

    One that never ends costs a run, not the memory of all that come after it.
    """

    __slots__ = ("_runs", "floor")

    def __init__(self) -> None:
        self.floor: OpId = 0
        """All below it have ended, and it has not."""
        self._runs: list[list[OpId]] = []  # [first, behind the last], in order, apart

    def __contains__(self, op: OpId) -> bool:
        if op < self.floor:
            return True
        at = bisect_right(self._runs, op, key=itemgetter(0))
        return at > 0 and op < self._runs[at - 1][1]

    def add(self, op: OpId) -> None:
        """Notes one that is not in it yet."""
        runs = self._runs
        at = bisect_right(runs, op, key=itemgetter(0))
        if at and runs[at - 1][1] == op:
            at -= 1
            runs[at][1] += 1
        else:
            runs.insert(at, [op, op + 1])
        if at + 1 < len(runs) and runs[at + 1][0] == op + 1:
            runs[at][1] = runs.pop(at + 1)[1]
        if runs[0][0] == self.floor:
            self.floor = runs.pop(0)[1]

    def missing(self, stop: OpId) -> list[OpId]:
        """Returns those below `stop` that are not in it, in order."""
        missing: list[OpId] = []
        at = self.floor
        for first, behind in self._runs:
            missing += range(at, min(first, stop))
            at = behind
        return [*missing, *range(at, stop)]


@dataclass(slots=True)
class Ops:
    """The operations of one kind: how many were issued, and which have ended for all."""

    issued: int = 0
    ended: Ended = field(default_factory=Ended)


class Machine:
    """The replicated state of one group; one instance on every rank, on the thread that steps.

    Every method is a step input or a record and returns its effects, which are the same on all
    ranks. None blocks.

    Attributes:
        number: Of the last record that was applied; 0: none yet.
        now: The leader's clock in it, in seconds.
        tickets: The open ones, in the order of their ids.
        occupancy: Pages in open tickets.
    """

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self.config = config
        self.number = 0
        self.now = 0.0
        self.epoch = 0
        self.storage_on = False
        self.tickets: dict[TicketId, Ticket] = {}
        self.next_ticket: TicketId = 0
        self.occupancy = 0
        self.ops = tuple(Ops() for _ in Kind)
        self._ledger = ledger
        self._labels: dict[tuple[str, int], TicketId] = {}
        self._cancels: dict[tuple[str, int], None] = {}
        self._again: list[TicketId] = []  # moved since the last record, and may move on as they are
        self._digest = 0
        self._digests: deque[int] = deque(maxlen=config.window + 64)

    # -- step inputs

    def submit(self, span: Span) -> TicketId | None:
        """Opens a ticket for a span.

        Returns:
            Its id, or None: L3 is off, the span is below the threshold, too many pages are in open
            tickets, or the attempt was aborted before.

        Raises:
            ConsensusError: The same attempt of the request has an open ticket.
            ConfigError: The span is longer than `Config.max_pages`.
        """
        if span.label in self._labels:
            raise ConsensusError(
                f"request {span.rid!r}, attempt {span.attempt}, was submitted twice: ticket "
                f"{self._labels[span.label]} is open; a new attempt has a new number"
            )
        if span.pages > self.config.max_pages:
            raise ConfigError(
                f"request {span.rid!r} asks for {span.pages} pages; max_pages is "
                f"{self.config.max_pages}"
            )
        refused = (
            not self.storage_on
            or span.pages < self.config.threshold_pages
            or self.occupancy + span.pages > self.config.occupancy_pages
        )
        if span.label in self._cancels:
            del self._cancels[span.label]
            refused = True
        self._mix(_SUBMIT, span.digest, refused)
        if refused:
            return None
        ticket = Ticket(self.next_ticket, span, self.number, self.now)
        self.tickets[ticket.id] = ticket
        self.next_ticket += 1  # last: what is below it and not open has ended
        self._labels[span.label] = ticket.id
        self.occupancy += ticket.held
        return ticket.id

    def abort(self, rid: str, attempt: int = 0) -> list[Effect]:
        """Settles an attempt's ticket at 0; without one, its submit will be refused."""
        label = (rid, attempt)
        self._mix(_ABORT, crc32(f"{attempt}:{rid}".encode(errors="surrogatepass")))
        ticket = self.tickets.get(self._labels.get(label, -1))
        effects: list[Effect] = []
        if ticket is None:
            self._cancels[label] = None
            if len(self._cancels) > CANCELS_KEPT:
                del self._cancels[next(iter(self._cancels))]
        elif ticket.phase is not Phase.SETTLED:
            self._settle(ticket, 0, "aborted", effects)
        return effects

    def want(self, ticket: TicketId) -> list[Effect]:
        """The scheduler would run the request now: under best_effort its ticket settles.

        Raises:
            ConsensusError: There never was such a ticket.
        """
        if not 0 <= ticket < self.next_ticket:
            raise ConsensusError(f"ticket {ticket} was never submitted; next is {self.next_ticket}")
        self._mix(_WANT, ticket)
        open_one = self.tickets.get(ticket)
        effects: list[Effect] = []
        if open_one and open_one.phase is not Phase.SETTLED and self.config.policy == "best_effort":
            self._settle(open_one, open_one.usable(), "wanted", effects)
        return effects

    def issue(self, kind: Kind) -> OpId:
        """Numbers an operation, also on a rank that has nothing to do for it."""
        ops = self.ops[kind]
        self._mix(_ISSUE, kind, ops.issued)
        ops.issued += 1
        return ops.issued - 1

    def witness(self, value: int) -> None:
        """Mixes an own value of the engine into the digest: ranks must have the same.

        Raises:
            ConfigError: It does not fit in 64 bits, of which one is the sign.
        """
        if not -(1 << 63) <= value < 1 << 63:
            raise ConfigError(f"a witness of {value.bit_length()} bits: it is 63 and a sign")
        self._mix(_WITNESS, 0, value)

    # -- records

    def apply(self, record: Record) -> list[Effect]:
        """Applies the next record, before the inputs of its step.

        Raises:
            ConsensusError: It is not the next one, or names what this rank does not have: the
                ranks' states differ.
        """
        if record.number != self.number + 1:
            raise ConsensusError(f"record {record.number} came after record {self.number}")
        self.number, self.now = record.number, record.now
        effects: list[Effect] = []
        switched = (record.epoch, record.storage_on) != (self.epoch, self.storage_on)
        if switched:
            self._switch(record, effects)
        if record.acks != NO_ACKS:
            for kind in Kind:
                self._consume(kind, record.acks[kind], effects)
        for number, bounds in record.rows.items():
            if number not in self.tickets:
                raise ConsensusError(
                    f"record {record.number} names ticket {number}, which is not open here"
                )
            self.tickets[number].bounds = bounds
        if switched or self.config.policy == "timeout":
            changed: Iterable[TicketId] = list(self.tickets)
        else:  # what a rank has declined or finished early says no more than it did before
            changed = sorted({*record.rows, *self._again})
        self._again = []
        for number in changed:
            self._decide(self.tickets[number], effects)
        self._mix(_APPLY, record.number, record.epoch, record.storage_on)
        self._digests.appendleft(self._digest)
        return effects

    @property
    def digest(self) -> int:
        """Of all steps so far: it changes with every record and input."""
        return self._digest

    def digests(self, count: int) -> tuple[int, ...]:
        """Returns the digests after the last `count` records, the newest first."""
        return tuple(self._digests)[:count]

    def digest_after(self, number: int) -> int | None:
        """Returns the digest after a record; None: too long ago, or not applied."""
        back = self.number - number
        return self._digests[back] if 0 <= back < len(self._digests) else None

    # -- rules

    def _switch(self, record: Record, effects: list[Effect]) -> None:
        if record.epoch < self.epoch:
            raise ConsensusError(
                f"record {record.number} goes back from epoch {self.epoch} to {record.epoch}"
            )
        effects.append(Storage(record.storage_on, record.epoch))
        self.epoch, self.storage_on = record.epoch, record.storage_on

    def _consume(self, kind: Kind, acks: Acks, effects: list[Effect]) -> None:
        ops = self.ops[kind]
        for op in acks.ended:
            in_turn = op == ops.ended.floor if kind.in_order else op not in ops.ended
            if op >= ops.issued or not in_turn:
                raise ConsensusError(
                    f"record {self.number} ends {kind.name.lower()} {op}: {ops.issued} were issued "
                    f"here, and all below {ops.ended.floor} have ended"
                )
            ops.ended.add(op)
            ok = op not in acks.failed
            effects.append(Consume(kind, op, ok))
            self._mix(_CONSUME, kind, op, ok)

    def _decide(self, ticket: Ticket, effects: list[Effect]) -> None:
        bounds = ticket.bounds
        if ticket.phase is Phase.SETTLED:
            if bounds.quiet:
                self._release(ticket, effects)
        elif not self.storage_on:
            self._settle(ticket, ticket.usable(), "off", effects)
        elif ticket.phase is Phase.ASKING and bounds.hit_high < self.config.threshold_pages:
            self._settle(ticket, 0, "short", effects)
        elif ticket.phase is Phase.READING and ticket.complete():
            self._settle(ticket, ticket.usable(), "complete", effects)
        elif self._overdue(ticket):
            self._settle(ticket, ticket.usable(), "timeout", effects)
        elif ticket.phase is Phase.ASKING and bounds.hit_low == bounds.hit_high:
            self._grant(ticket, ticket.end(), effects)

    def _overdue(self, ticket: Ticket) -> bool:
        """Judged by the leader's clock in the record alone."""
        if self.config.policy != "timeout":
            return False
        limit = self.config.timeout_s + self.config.timeout_page_s * ticket.span.pages
        return self.now - ticket.since >= limit

    def _grant(self, ticket: Ticket, pages: int, effects: list[Effect]) -> None:
        if pages < self.config.threshold_pages:
            self._settle(ticket, 0, "short", effects)
        elif not self._ledger.take(ticket.id, pages):
            self._settle(ticket, 0, "full", effects)
        elif ticket.phase is not Phase.ASKING:
            raise ConsensusError(
                f"ticket {ticket.id} was settled from inside Ledger.take: the pages would be lost; "
                f"inputs come when the step has returned"
            )
        else:
            self.occupancy -= ticket.held
            ticket.phase, ticket.granted = Phase.READING, pages
            self.occupancy += ticket.held
            self._again.append(ticket.id)
            effects.append(Grant(ticket.id, pages))
            self._mix(_GRANT, ticket.id, pages)

    def _settle(self, ticket: Ticket, pages: int, reason: str, effects: list[Effect]) -> None:
        self.occupancy -= ticket.held
        ticket.phase, ticket.settled = Phase.SETTLED, pages
        self.occupancy += ticket.held
        effects.append(Settle(ticket.id, pages, ticket.granted, reason, ticket.bounds.groups))
        self._mix(_SETTLE, ticket.id, pages, ticket.granted)
        if ticket.granted:
            self._again.append(ticket.id)
            self._ledger.settle(ticket.id, pages)
        else:
            self._close(ticket)

    def _release(self, ticket: Ticket, effects: list[Effect]) -> None:
        pages = ticket.granted - ticket.settled
        self.occupancy -= ticket.held
        self._ledger.release(ticket.id, pages)
        effects.append(Release(ticket.id, pages))
        self._mix(_RELEASE, ticket.id, pages)
        self._close(ticket)

    def _close(self, ticket: Ticket) -> None:
        del self.tickets[ticket.id]
        del self._labels[ticket.span.label]

    def _mix(self, code: int, first: int, second: int = 0, third: int = 0) -> None:
        """Rolls a step into the digest: crc32, the same on every machine; it finds accidents."""
        step = _STEP.pack(code, first, second, third, self._digest)
        self._digest = crc32(step)
