"""What this rank has physically reached: written by its I/O threads, read by its reports.

A fact only grows. The table refuses one that shrinks, and says quiet of a ticket by itself: when
the settlement was applied here and every call that entered has left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index
from threading import Condition
from typing import TYPE_CHECKING

from l3store.consensus.protocol import Ended
from l3store.consensus.values import ALL_ENDS, NO_ACKS, UNLIMITED, Facts, Kind, Row
from l3store.errors import ConsensusError

if TYPE_CHECKING:
    from l3store.consensus.values import Config, OpFacts, OpId, Record, Span, TicketId

__all__ = ["FactTable"]


@dataclass(slots=True)
class _Open:
    """What this rank knows of one open ticket."""

    span: Span
    step: int
    """Number of the last record that was applied before its submit."""
    hit: int = UNLIMITED
    ends: int = 0
    """0: none were said, and none are needed, or only 0 pages are legal."""
    done: int = 0
    groups: int = 0
    final: bool = False
    granted: int = 0
    settled: bool = False
    entered: bool = False
    """A call has been in its pages: without one nothing can have been read."""
    calls: int = 0
    """That are running in pages of the ticket."""
    said: bool = False
    """A report may have carried it: it cannot be taken back."""

    def row(self, ticket: TicketId) -> Row:
        quiet = self.settled and not self.calls
        return Row(
            ticket, self.span.digest, self.hit, self.done, self.groups, self.final or quiet, quiet
        )


@dataclass(slots=True)
class _Acks:
    """Operations of one kind."""

    issued: int = 0
    ended: Ended = field(default_factory=Ended)
    said: set[OpId] = field(default_factory=set)
    """Those of the ended ones above the floor that others may still wait for."""
    failed: set[OpId] = field(default_factory=set)


class FactTable:
    """The facts of one rank. Thread-safe; no method blocks, but for a lock that is held shortly.

    A ticket or operation that ended for all is forgotten, and what a late call still says of it is
    ignored; one that never began here is a `ConsensusError` at the call.
    """

    def __init__(self, config: Config, rank: int, incarnation: int) -> None:
        self._config, self._rank, self._incarnation = config, rank, incarnation
        self._lock = Condition()
        self._tickets: dict[TicketId, _Open] = {}
        self._next_ticket: TicketId = 0
        self._acks = tuple(_Acks() for _ in Kind)
        self._applied = 0
        self._digests: tuple[int, ...] = ()
        self._late_pages = 0
        self._epoch = 0
        self._storage_on = False
        self._usable = False
        self._veto = 0
        self._ready = 0
        self._seq = 0
        self._version = 0
        self._rows: dict[TicketId, Row] = {}
        self._stale: set[TicketId] = set()  # rows that have changed since `_refresh`
        self._said: frozenset[Row] = frozenset()
        self._ends: dict[TicketId, int] = {}
        self._told: OpFacts | None = None  # until it changes

    # -- by the thread that steps

    def open(self, ticket: TicketId, span: Span) -> None:
        """Begins the row of a ticket, right after its submit: a rank without one has answered."""
        with self._changing(ticket):
            self._tickets[ticket] = _Open(span, self._applied)
            self._next_ticket = ticket + 1

    def granted(self, ticket: TicketId, pages: int) -> None:
        """The grant was applied here: its end point is chosen, and need not be said any more."""
        with self._changing(ticket):
            row = self._tickets.get(ticket)
            if row is not None:
                row.granted = pages

    def decline(self, ticket: TicketId) -> None:
        """This rank takes no further part: no call may enter, and without a hit the hit is 0."""
        with self._changing(ticket):
            row = self._tickets.get(ticket)
            if row is None:
                return
            if not row.said and not row.calls:
                del self._tickets[ticket]  # a rank without a row has answered
                return
            row.settled = row.final = True
            if row.hit == UNLIMITED:
                row.hit = 0

    def settle(self, ticket: TicketId) -> None:
        """The settlement was applied here: from now on no call may enter."""
        with self._changing(ticket):
            row = self._tickets.get(ticket)
            if row is not None:
                row.settled = True

    def close(self, ticket: TicketId) -> None:
        """The ticket has ended for all."""
        with self._changing(ticket):
            self._tickets.pop(ticket, None)

    def issued(self, kind: Kind, op: OpId) -> None:
        """The operation has its number; from now on it can be acked."""
        with self._lock:
            self._acks[kind].issued = op + 1

    def consumed(self, kind: Kind, op: OpId) -> None:
        """The operation has ended for all."""
        with self._changing():
            acks, self._told = self._acks[kind], None
            acks.failed.discard(op)
            acks.said.discard(op)

    def applied(
        self, number: int, digests: tuple[int, ...], epoch: int, *, storage_on: bool
    ) -> None:
        """A record was applied: its number, the state's digests, newest first, and the epoch."""
        with self._changing():
            self._applied, self._digests = number, digests
            self._epoch, self._storage_on = epoch, storage_on
            self._offer()

    # -- by any thread

    def hit(self, ticket: TicketId, pages: int, ends: int | None = None) -> None:
        """The answer of the query, once: how many pages are stored for this rank.

        Args:
            ticket: The ticket.
            pages: 0 to `Span.pages`: a contiguous run of kv and all_pages pools from the start.
                A query that failed, or is not back at its deadline, says 0.
            ends: For a span with trailing_pages pools: bit `n` set = `n` pages are a legal end.

        Raises:
            ConsensusError: The ticket is not known, has another hit, or the number is no such run.
        """
        with self._changing(ticket):
            row = self._row(ticket)
            if row is None or row.settled:
                return
            pages = index(pages)
            if not 0 <= pages <= row.span.pages:
                raise ConsensusError(
                    f"ticket {ticket}: a hit of {pages} pages; the span has {row.span.pages}"
                )
            if (ends is not None) != row.span.trailing and pages:
                raise ConsensusError(
                    f"ticket {ticket}: end points are said by all ranks or none, as the span "
                    f"{'has' if row.span.trailing else 'has no'} pool with the rule trailing_pages"
                )
            legal = (index(ends or 1) & ((2 << pages) - 1)) if row.span.trailing else 0
            if row.hit != UNLIMITED and (row.hit, row.ends or legal) != (pages, legal):
                raise ConsensusError(
                    f"ticket {ticket}: hit {pages}, ends {legal:#b} after hit {row.hit}, ends "
                    f"{row.ends:#b}"
                )
            row.hit, row.ends = pages, legal

    def progress(self, ticket: TicketId, pages: int, groups: int = 0) -> None:
        """So many pages from the start are read and verified, and no call is in them any more.

        Raises:
            ConsensusError: The ticket is not known, no call has entered, or the number shrinks or
                is above the span's.
        """
        with self._changing(ticket):
            row = self._row(ticket)
            if row is None or (row.settled and (row.final or not row.calls)):
                return  # too late: a report may have said that it is final
            pages, groups = index(pages), index(groups)
            if pages < row.done or groups < row.groups or (row.final and pages > row.done):
                raise ConsensusError(
                    f"ticket {ticket}: progress {pages} (groups {groups}) after {row.done} "
                    f"(groups {row.groups}){', which was final' if row.final else ''}"
                )
            if pages > row.span.pages or groups >= UNLIMITED:
                raise ConsensusError(
                    f"ticket {ticket}: {pages} pages, {groups} groups are done; the span has "
                    f"{row.span.pages} pages"
                )
            if (pages or groups) and not row.entered:
                raise ConsensusError(
                    f"ticket {ticket}: {pages} pages are done, and no call has entered: its pages "
                    f"would be released under one that runs"
                )
            row.done, row.groups = pages, groups

    def finish(self, ticket: TicketId) -> None:
        """Progress is final: all is read, or a call failed or is past its deadline.

        Without a hit yet the hit is 0.
        """
        with self._changing(ticket):
            row = self._row(ticket)
            if row is not None:
                row.final = True
                if row.hit == UNLIMITED:
                    row.hit = 0

    def enter(self, ticket: TicketId) -> bool:
        """A call is about to touch pages of the ticket.

        Returns:
            False: the ticket is settled, and the call must not begin. True: `leave` must follow,
            when the call has returned, not before.

        Raises:
            ConsensusError: The ticket is not known, or has no pages yet.
        """
        with self._changing(ticket):
            row = self._row(ticket)
            if row is None or row.settled:
                return False
            if not row.granted:
                raise ConsensusError(f"ticket {ticket} has no pages: a call waits for its Grant")
            row.entered = True
            row.calls += 1
            return True

    def leave(self, ticket: TicketId) -> None:
        """A call that entered has returned, and touches nothing any more.

        Raises:
            ConsensusError: No call is in the ticket's pages.
        """
        with self._changing(ticket):
            _numbered("ticket", ticket)
            row = self._tickets.get(ticket)
            if row is None or not row.calls:
                raise ConsensusError(f"ticket {ticket}: more calls left than entered")
            row.calls -= 1

    def late(self, pages: int) -> None:
        """So many more pages are under calls past their deadline; negative: so many came back.

        Above `Config.max_late_pages` the epoch is vetoed, and until they are fewer the next one.

        Raises:
            ConsensusError: More came back than were late.
        """
        with self._changing():
            if self._late_pages + index(pages) < 0:
                raise ConsensusError(f"{-pages} late pages came back of {self._late_pages}")
            self._late_pages += pages
            if pages > 0 and self._late_pages > self._config.max_late_pages:
                self._veto_now()
            self._offer()

    def ack(self, kind: Kind, op: OpId, *, ok: bool = True) -> None:
        """An operation has ended here: its call has returned, not only passed its deadline.

        Raises:
            ConsensusError: It was never issued, has ended before, or (write-through, load-back)
                an earlier one has not.
        """
        with self._changing():
            acks, self._told = self._acks[kind], None
            _numbered(kind.name.lower(), op)
            name = f"{kind.name.lower()} {op}"
            if not 0 <= op < acks.issued:
                raise ConsensusError(f"{name} was never issued; {acks.issued} were")
            if op in acks.ended:
                raise ConsensusError(f"{name} was acked twice")
            floor = acks.ended.floor
            if kind.in_order and op != floor:
                raise ConsensusError(f"{name} was acked before {floor}; the kind is in order")
            if not ok:
                acks.failed.add(op)
            acks.ended.add(op)
            if op != floor:
                acks.said.add(op)
            elif acks.said:
                acks.said = {op for op in acks.said if op > acks.ended.floor}

    def veto(self) -> None:
        """This rank's path to L3 is unusable: the epoch ends for all. It probes until `ready`."""
        with self._changing():
            self._usable = False
            self._veto_now()

    def ready(self) -> None:
        """This rank's path to L3 is usable: at start, when a store was attached, after a probe.

        When all ranks say so, and the last epoch has ended, the next one begins.
        """
        with self._changing():
            self._usable = True
            self._offer()

    # -- by the reports

    @property
    def number(self) -> int:
        """Of the last record that was applied here."""
        return self._applied

    @property
    def version(self) -> int:
        """Goes up at each change."""
        return self._version

    def wait(self, version: int, timeout: float) -> int:
        """Blocks until there is a change after `version`, at most `timeout` s; returns the last."""
        with self._lock:
            self._lock.wait_for(lambda: self._version != version, timeout)
            return self._version

    def wake(self) -> None:
        """Ends every `wait`."""
        with self._changing():
            pass

    def check(self, record: Record) -> None:
        """Holds a record against what this rank has reached.

        Raises:
            ConsensusError: The record claims more for all ranks than this one has.
        """
        with self._lock:
            for ticket, bounds in record.rows.items():
                row = self._tickets.get(ticket)
                if row is None:
                    hit, done, groups, quiet, legal = 0, 0, 0, True, 1
                else:
                    hit, done, groups = row.hit, row.done, row.groups
                    quiet, legal = row.settled and not row.calls, row.ends or 1
                if (
                    (bounds.hit_low > hit or (hit == UNLIMITED and bounds.hit_low))
                    or bounds.done_low > done
                    or bounds.groups > groups
                    or bounds.quiet > quiet
                    or (bounds.ends != ALL_ENDS and bounds.ends & ~legal)
                ):
                    ours = row.row(ticket) if row else Row(ticket, 0, hit=0, quiet=True)
                    raise ConsensusError(
                        f"record {record.number} says of ticket {ticket}: {bounds}; this rank has "
                        f"{ours}"
                    )
            for kind in Kind if record.acks != NO_ACKS else ():
                acks = self._acks[kind]
                for op in record.acks[kind].ended:
                    if op not in acks.ended:
                        raise ConsensusError(
                            f"record {record.number} ends {kind.name.lower()} {op}, which has not "
                            f"ended on this rank"
                        )

    def facts(self) -> Facts:
        """Returns all facts as of now, with the next sequence number."""
        with self._lock:
            self._seq += 1
            if self._stale:
                self._refresh()
            if self._told is None:
                self._told = (
                    tuple((acks.ended.floor, frozenset(acks.said)) for acks in self._acks),
                    tuple(frozenset(acks.failed) for acks in self._acks),
                )
            return Facts(
                self._incarnation, self._rank, self._seq, self._applied, self._digests,
                self._said, self._ends, *self._told, self._veto, self._ready,
            )  # fmt: skip

    # -- inner

    def _row(self, ticket: TicketId) -> _Open | None:
        _numbered("ticket", ticket)
        if not 0 <= ticket < self._next_ticket:
            raise ConsensusError(
                f"ticket {ticket} was never submitted; next is {self._next_ticket}"
            )
        return self._tickets.get(ticket)

    def _refresh(self) -> None:
        """Makes what a report says of the tickets; only changed rows are made again."""
        gone, new, ends = [], [], dict(self._ends)
        for ticket in self._stale:
            if ticket in self._rows:
                gone.append(self._rows.pop(ticket))
            ends.pop(ticket, None)
            row = self._tickets.get(ticket)
            if row is not None:
                row.said = True
                new.append(row.row(ticket))
                self._rows[ticket] = new[-1]
                if row.ends and not row.granted:
                    ends[ticket] = row.ends
        self._stale.clear()
        self._said, self._ends = self._said.difference(gone).union(new), ends

    def _changing(self, ticket: TicketId | None = None) -> _Change:
        return _Change(self, ticket)

    def _changed(self, ticket: TicketId | None) -> None:
        if ticket is not None:
            self._stale.add(ticket)
        self._version += 1
        self._lock.notify_all()

    def _veto_now(self) -> None:
        self._veto = max(self._veto, self._epoch, self._ready)

    def _offer(self) -> None:
        """Readiness is the number of the next epoch: a stale one cannot reach a later epoch."""
        few = self._late_pages <= self._config.max_late_pages
        if self._usable and few and not self._storage_on:
            self._ready = max(self._epoch, self._veto) + 1


def _numbered(what: str, number: object) -> None:
    """A float finds its row as its int does, and then no report can be encoded."""
    if type(number) is not int:
        raise ConsensusError(f"{what} {number!r} is no number that was given out: it is an int")


class _Change:
    """Holds the lock of a table; what comes after `with` is a change, unless it raises."""

    __slots__ = ("_table", "_ticket")

    def __init__(self, table: FactTable, ticket: TicketId | None) -> None:
        self._table, self._ticket = table, ticket

    def __enter__(self) -> None:
        self._table._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        table = self._table
        if kind is None:
            table._changed(self._ticket)
        table._lock.release()
