"""Tickets of an engine that always has about as many open, and the storage that serves them.

What a rank finds and reads of a ticket follows from both their numbers, so that every grant and
settlement can be held against the MIN that it must be. When it does is this rank's own affair.
"""

from __future__ import annotations

import heapq
from hashlib import blake2b
from struct import Struct
from threading import Condition, Thread
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from l3store.consensus.values import Grant, Release, Settle, Span, Storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.consensus.member import Member
    from l3store.consensus.table import FactTable
    from l3store.consensus.values import Config, Effect, TicketId

__all__ = [
    "BATCHES",
    "BATCH_PAGES",
    "BATCH_S",
    "PAGES",
    "QUERY_S",
    "QUICKEST_S",
    "Engine",
    "Ledger",
    "Moment",
    "Reads",
]

PAGES, BATCHES = 16, 4
BATCH_PAGES = PAGES // BATCHES
QUERY_S, BATCH_S, QUICKEST_S = 0.005, 0.0025, 0.005
"""Seconds of a query, of a batch for each ticket in flight, and of a batch at least; each is a
quarter more or less. A storage that brings 400 batches a second (3.4 GB/s of 128 pages of 64 KiB)
serves no more of them because more are asked for."""
_NAME = Struct("<QLL")


def draw(ticket: TicketId, rank: int, what: int) -> int:
    """Returns a number that is the same whoever asks."""
    return crc32(_NAME.pack(ticket, rank, what))


def hit(ticket: TicketId, rank: int) -> int:
    """Pages that a rank has stored: most of a span, now and then nothing."""
    drawn = draw(ticket, rank, 0)
    return PAGES - drawn % 4 if drawn >> 8 & 63 else 0


def reached(ticket: TicketId, rank: int, granted: int) -> int:
    """Pages that a rank can read: all, or fewer where a call fails."""
    drawn = draw(ticket, rank, 1)
    return granted if drawn & 15 else drawn % granted


class Moment(NamedTuple):
    """When something happened."""

    turn: int
    """How often the reads had been resumed: in between the group may rest."""
    at: float
    """Of the monotonic clock, which is the same for all processes of a machine."""


class Ledger:
    """Counts the pages that are reserved."""

    def __init__(self) -> None:
        self.reserved = 0

    def take(self, ticket: TicketId, pages: int) -> bool:
        self.reserved += pages
        return True

    def settle(self, ticket: TicketId, pages: int) -> None:
        self.reserved -= pages

    def release(self, ticket: TicketId, pages: int) -> None:
        self.reserved -= pages


class Reads:
    """One rank's queries and reads: a thread that writes the facts as they become due.

    Attributes:
        turn: How often they were resumed.
        tickets: In flight, as a rule: the more, the longer a batch takes.
        changes: Calls that wrote a fact.
        completed: When this rank began to say that all of a grant was read, by ticket.
    """

    def __init__(self, facts: FactTable, rank: int) -> None:
        self.turn, self.tickets, self.changes = 0, 1, 0
        self.completed: dict[TicketId, Moment] = {}
        self._facts, self._rank = facts, rank
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._begun = 0
        self._turn = Condition()
        self._paused: float | None = monotonic()
        self._late = 0.0  # how long it has rested so far
        self._thread = Thread(target=self._run, name="reads", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Goes on where it was; what was due in a second then is due in a second now."""
        with self._turn:
            if self._paused is not None:
                self._late += monotonic() - self._paused
                self._paused = None
                self.turn += 1
                self._turn.notify()

    def pause(self) -> None:
        """Nothing more is due until `resume`."""
        with self._turn:
            if self._paused is None:
                self._paused = monotonic()

    def query(self, ticket: TicketId) -> None:
        self._after(QUERY_S, ticket, lambda: self._query(ticket))

    def read(self, ticket: TicketId, granted: int) -> None:
        self._after(QUERY_S / 2, ticket, lambda: self._enter(ticket, granted))

    def _query(self, ticket: TicketId) -> None:
        self.changes += 1
        self._facts.hit(ticket, hit(ticket, self._rank))

    def _enter(self, ticket: TicketId, granted: int) -> None:
        self.changes += 1
        if self._facts.enter(ticket):
            self._later(ticket, granted, 1)

    def _later(self, ticket: TicketId, granted: int, batch: int) -> None:
        seconds = max(BATCH_S * self.tickets, QUICKEST_S)
        self._after(seconds, ticket, lambda: self._batch(ticket, granted, batch))

    def _batch(self, ticket: TicketId, granted: int, batch: int) -> None:
        most = reached(ticket, self._rank, granted)
        pages = min(batch * BATCH_PAGES, most)
        if pages == granted:
            self.completed[ticket] = Moment(self.turn, monotonic())
        self.changes += 1
        self._facts.progress(ticket, pages)
        if pages < most:
            self._later(ticket, granted, batch + 1)
            return
        self.changes += 2
        self._facts.finish(ticket)
        self._facts.leave(ticket)

    def _after(self, seconds: float, ticket: TicketId, call: Callable[[], None]) -> None:
        with self._turn:
            self._begun += 1
            drawn = draw(ticket, self._rank, self._begun) / (1 << 32)
            due = monotonic() - self._late + seconds * (0.75 + drawn / 2)
            heapq.heappush(self._due, (due, self._begun, call))
            if self._due[0][1] == self._begun:
                self._turn.notify()

    def _run(self) -> None:
        while True:
            with self._turn:
                while (pause := self._pause()) is None or pause > 0:
                    self._turn.wait(pause)
                call = heapq.heappop(self._due)[2]
            call()

    def _pause(self) -> float | None:
        if self._paused is not None or not self._due:
            return None
        return self._due[0][0] + self._late - monotonic()


class Engine:
    """The inputs that every rank gives alike, and what it does with the effects.

    Attributes:
        settled: When this rank's step with the settlement returned, by ticket.
        ended: Tickets that were released, or settled without pages.
    """

    def __init__(self, member: Member, ledger: Ledger, config: Config, rank: int) -> None:
        self.reads = Reads(member.facts, rank)
        self.settled: dict[TicketId, Moment] = {}
        self.ended = 0
        self._member, self._ledger = member, ledger
        self._ranks = range(config.topology.ranks)
        self._granted: dict[TicketId, int] = {}
        self._requests = 0
        self._digest = blake2b(digest_size=16)
        member.facts.ready()

    def carry_out(self, effects: list[Effect]) -> None:
        """Begins and ends reads, and holds each decision against what it must be."""
        now = monotonic()
        self._digest.update(repr(effects).encode())
        for effect in effects:
            if isinstance(effect, Grant):
                self._expect(effect, effect.pages, self._hit(effect.ticket))
                self._granted[effect.ticket] = effect.pages
                self.reads.read(effect.ticket, effect.pages)
            elif isinstance(effect, Settle):
                self._settle(effect, now)
            elif isinstance(effect, Release):
                self.ended += 1
            elif not (isinstance(effect, Storage) and effect.on):
                raise SystemExit(f"nobody asked for {effect}")

    def submit(self, tickets: int) -> None:
        """Has so many tickets open, once storage is on."""
        machine = self._member.machine
        while machine.storage_on and len(machine.tickets) < tickets:
            self._requests += 1
            span = Span(f"request {self._requests}", 0, 0, PAGES, b"tail of it")
            ticket = self._member.submit(span)
            if ticket is None:
                raise SystemExit(f"{span} was refused")
            self.reads.query(ticket)

    @property
    def drained(self) -> bool:
        return not self._member.machine.tickets

    def proof(self) -> tuple[str, int]:
        """Returns a digest of all effects so far, and the number of tickets that have ended.

        Raises:
            SystemExit: A ticket is open, or a page is reserved.
        """
        if self._member.machine.tickets or self._ledger.reserved:
            raise SystemExit(f"{self._ledger.reserved} pages were not released at the end")
        return self._digest.hexdigest(), self.ended

    def _settle(self, effect: Settle, now: float) -> None:
        ticket = effect.ticket
        granted = self._granted.pop(ticket, 0)
        if granted:
            least = min(reached(ticket, rank, granted) for rank in self._ranks)
        else:
            least = self._hit(ticket)  # 0, or it would have been granted
            self.ended += 1
        self._expect(effect, effect.pages, least)
        if least and least == granted:
            self.settled[ticket] = Moment(self.reads.turn, now)

    def _hit(self, ticket: TicketId) -> int:
        return min(hit(ticket, rank) for rank in self._ranks)

    def _expect(self, effect: Effect, pages: int, wanted: int) -> None:
        if pages != wanted:
            raise SystemExit(f"{effect}: the ranks together have {wanted} pages")
