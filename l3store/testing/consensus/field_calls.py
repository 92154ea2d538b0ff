"""The I/O side of one scripted rank: what it makes of calls that fail, hang, or come too late.

`Calls` keeps the rules: an exception is 0, a deadline ends a call for the protocol, pages under it
stay out until it returns, a ticket is (rid, attempt), pools are clamped to what all of them have,
memory is reserved before the vote. `naive_calls` has what engines do instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from l3store.testing.consensus.field_script import NEVER, RAISES, Answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.consensus.table import FactTable
    from l3store.consensus.values import Kind, OpId, Span, TicketId
    from l3store.testing.consensus.field_script import Label, Script

__all__ = ["Calls", "Memory", "Wait"]


class Wait(Protocol):
    """Runs an action some seconds from now: in virtual time, or on a real clock."""

    def __call__(self, delay: float, action: Callable[..., None], *args: object) -> None:
        """Has it run once."""
        ...


@dataclass(slots=True)
class Memory:
    """A model of what only this rank knows: its free memory, in pages."""

    free: int
    held: dict[TicketId, int] = field(default_factory=dict)

    def reserve(self, ticket: TicketId, pages: int) -> bool:
        """Takes room for a ticket; False: it does not fit."""
        if pages > self.free:
            return False
        self.free -= pages
        self.held[ticket] = pages
        return True

    def give_back(self, ticket: TicketId, keep: int = 0) -> None:
        """Returns what a ticket holds, all but the first `keep` pages."""
        held = self.held.pop(ticket, 0)
        self.free += max(held - keep, 0)


class Calls:
    """One rank's storage calls.

    Attributes:
        read_pages: Pages that each attempt has really read here.
        reused: Whether a page was given back while a call was in it.
        writer_alive: Whether the thread that writes backups still runs.
        died: The exception that ended a thread, in its words.
    """

    def __init__(self, script: Script, rank: int, facts: FactTable, wait: Wait) -> None:
        self.facts = facts
        self.read_pages: dict[Label, int] = {}
        self.reused = False
        self.writer_alive = True
        self.died = ""
        self.script, self.rank, self.wait = script, rank, wait
        self.deadline = script.config().deadline_s
        self.in_call: dict[TicketId, int] = {}
        self._labels: dict[TicketId, Label] = {}

    # -- a prefetch

    def query(self, ticket: TicketId, span: Span, memory: Memory) -> None:
        """Asks how much is stored; by the deadline there is an answer: at worst 0."""
        self._labels[ticket] = span.label
        answer = self.answer(ticket)
        if not answer.fits or not memory.reserve(ticket, span.pages):
            self.facts.decline(ticket)  # "does not fit" is a vote of 0
        elif answer.after == NEVER:
            self.wait(self.deadline, self.facts.hit, ticket, 0)
        elif answer.fails:
            self.wait(answer.after, self.facts.hit, ticket, 0)
        else:
            self.wait(answer.after, self.answered, ticket, span)

    def answered(self, ticket: TicketId, span: Span) -> None:
        """The query is back: kv is clamped to what its sidecars have."""
        answer = self.answer(ticket)
        hit, ends = min(answer.hit, span.pages), None
        for pool, rule in span.sidecars:
            stored = answer.pools[pool]
            if rule == "trailing_pages" and not isinstance(stored, int):
                ends = sum(1 << end for end in stored) | 1
            elif rule == "all_pages" and isinstance(stored, int):
                hit = min(hit, stored)
        self.facts.hit(ticket, hit, ends)

    def read(self, ticket: TicketId, pages: int) -> None:
        """Reads the pages of a grant, in calls that run at the same time."""
        answer = self.answer(ticket)
        reads = answer.reads or ((0.01, pages),)
        for number, (after, done) in enumerate(reads):
            last = number == len(reads) - 1 and not answer.hangs_s
            if self._enter(ticket):
                self.wait(after, self.returned, ticket, min(done, pages), last)
        if answer.hangs_s and self._enter(ticket):
            self.hanging(ticket, pages, answer.hangs_s)

    def returned(self, ticket: TicketId, done: int, last: bool) -> None:
        """A read is back, and its pages are verified."""
        label = self._labels[ticket]
        self.read_pages[label] = max(done, self.read_pages.get(label, 0))
        self._leave(ticket)
        self.facts.progress(ticket, done)
        if last:
            self.facts.finish(ticket)

    def hanging(self, ticket: TicketId, pages: int, after: float) -> None:
        """A read outlasts its deadline: for the protocol it has ended, and it keeps its pages."""
        self.wait(self.deadline, self.facts.finish, ticket)
        self.wait(self.deadline, self.facts.late, pages)
        if after != NEVER:
            self.wait(after, self.facts.late, -pages)
            self.wait(after, self._leave, ticket)

    def given_back(self, ticket: TicketId) -> None:
        """The ticket's pages are free on this rank."""
        self.reused |= self.in_call.get(ticket, 0) > 0

    # -- operations

    def operate(self, kind: Kind, op: OpId) -> None:
        """Begins an operation; whatever becomes of it, it is acked when it has returned."""
        durations = self.script.durations[kind]
        took = durations[self.rank % len(durations)][op]
        if took == RAISES:
            self.raised(kind, op)
        elif took != NEVER:
            self.wait(took, self.ended, kind, op)

    def raised(self, kind: Kind, op: OpId) -> None:
        """An operation has raised: it is acked as failed, and the thread goes on."""
        self.facts.ack(kind, op, ok=False)

    def ended(self, kind: Kind, op: OpId) -> None:
        """An operation has returned."""
        self.facts.ack(kind, op)

    # -- inner

    def answer(self, ticket: TicketId) -> Answer:
        """Returns what this rank's storage does for a ticket."""
        answers = self.script.answers[self._labels[ticket]]
        return answers[self.rank % len(answers)]

    def label(self, ticket: TicketId) -> Label:
        """Returns (rid, attempt) of a ticket."""
        return self._labels[ticket]

    def _enter(self, ticket: TicketId) -> bool:
        if not self.facts.enter(ticket):
            return False
        self.in_call[ticket] = self.in_call.get(ticket, 0) + 1
        return True

    def _leave(self, ticket: TicketId) -> None:
        self.in_call[ticket] -= 1
        self.facts.leave(ticket)
