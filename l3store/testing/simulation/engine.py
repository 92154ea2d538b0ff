"""A small engine on one rank: a scheduler that knows nothing but the replicated state.

It stands for a real one: requests wait for their tickets, run, and leave their pages in the prefix
tree, from where they go to L3. Its inputs come from the plan and from the replicated state alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from l3store.consensus.member import Member
from l3store.consensus.values import Consume, Grant, Kind, Settle, Span, Storage
from l3store.testing.simulation.host import Host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.consensus.agreement import Agreement
    from l3store.consensus.values import Effect, OpId, TicketId
    from l3store.testing.simulation.host import Node
    from l3store.testing.simulation.plan import Page, Plan, Request
    from l3store.testing.simulation.storage import Storage as RankStorage

__all__ = ["Engine", "Live"]

MOST_RUNNING = 2


@dataclass(slots=True)
class Live:
    """A request from its arrival to its end."""

    request: Request
    matched: int = 0
    """Pages that were in the tree when it came; pinned until it is settled or aborted."""
    ticket: TicketId | None = None
    waiting: bool = False
    """For its ticket."""
    running: int = 0
    """Steps that are left."""
    pinned: tuple[Page, ...] = ()


class Engine:
    """One rank. `step` is one turn of its scheduler.

    Attributes:
        settled: (request, pages, reason) of every ticket that was settled, in order.
        finished: Names of requests that ended, in order.
        switches: How often L3 went on or off.
        spans: Of every ticket that was submitted.
        between: Called in each step, after its record and before its inputs; None: nothing is.
    """

    member_type: ClassVar[type[Member]] = Member
    host_type: ClassVar[type[Host]] = Host

    def __init__(self, plan: Plan, rank: int, agreement: Agreement, storage: RankStorage) -> None:
        self.rank, self.storage = rank, storage
        self.host = self.host_type(plan.capacity, storage.freed)
        self.member = self.member_type(agreement, self.host)
        self.settled: list[tuple[str, int, str]] = []
        self.finished: list[str] = []
        self.switches = 0
        self.effects: list[Effect] = []
        self.spans: dict[TicketId, Span] = {}
        self.between: Callable[[], object] | None = None
        self._plan = plan
        self._on = False
        self._queue: list[Live] = []
        self._by_ticket: dict[TicketId, Live] = {}
        self._moving: dict[tuple[Kind, OpId], list[Node]] = {}
        self._odd = {f.number for f in plan.faults if f.kind == "unequal input" and f.rank == rank}
        self._cancelled: set[str] = set()  # aborted before they came
        self._aborts = [
            (int(fault.at), plan.requests[fault.number].name)
            for fault in plan.faults
            if fault.kind == "aborted" and fault.number < len(plan.requests)
        ]

    def pinned_for_ever(self) -> list[Page]:
        """Returns pages that are pinned although no operation and no request holds them."""
        held = {node.page for nodes in self._moving.values() for node in nodes}
        held.update(page for live in self._queue for page in live.pinned)
        return [n.page for n in self.host.nodes.values() if n.pins and n.page not in held]

    @property
    def idle(self) -> bool:
        """Whether every request of the plan has ended here."""
        return len(self.finished) == len(self._plan.requests)

    def step(self) -> bool:
        """Takes the next record, if it is here, then the inputs of its step."""
        effects = self.member.poll()
        if effects is None:
            return False
        self.effects = []
        self._carry_out(effects)
        if self.between is not None:
            self.between()
        self._inputs(self.member.machine.number)
        return True

    # -- effects

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Grant):
                reserved = self.host.tickets[effect.ticket]
                self.storage.read(
                    effect.ticket, reserved.pages[: effect.pages], tuple(reserved.slots)
                )
            elif isinstance(effect, Settle):
                self._settle(effect)
            elif isinstance(effect, Consume):
                self._consume(effect)
            elif isinstance(effect, Storage) and effect.on != self._on:
                self._on = self.storage.on = effect.on
                self.switches += 1

    def _settle(self, effect: Settle) -> None:
        live = self._by_ticket.pop(effect.ticket)
        self.settled.append((live.request.name, effect.pages, effect.reason))
        live.waiting = False
        self._unpin(live)
        if effect.granted:
            self.storage.joined(self.host.joined)
            self.host.joined.clear()
        else:
            self.host.forget(effect.ticket)

    def _consume(self, effect: Consume) -> None:
        nodes = self._moving.pop((effect.kind, effect.op))
        self.storage.consumed(effect.kind, effect.op, ok=effect.ok)
        pages = [node.page for node in nodes]
        if effect.kind is Kind.WRITE_THROUGH:
            for node in nodes:
                node.written = True
            if self._may_back_up():
                op = self._issue(Kind.BACKUP, nodes)
                self.storage.backup(op, pages, [node.slot for node in nodes])
        elif effect.kind is Kind.BACKUP:
            for node in nodes:
                node.stored = self._succeeded(effect)
        self.host.pin(pages, -1)

    def _may_back_up(self) -> bool:
        return self.member.machine.storage_on

    def _succeeded(self, effect: Consume) -> bool:
        """By the word of all ranks."""
        return effect.ok

    def _issue(self, kind: Kind, nodes: list[Node]) -> OpId:
        """Numbers an operation on pages, which stay pinned until it has ended on all ranks."""
        op = self.member.issue(kind)
        self._moving[kind, op] = nodes
        self.host.pin([node.page for node in nodes], 1)
        return op

    # -- inputs

    def _inputs(self, step: int) -> None:
        for number, request in enumerate(self._plan.requests):
            if request.step == step:
                self._arrive(request, odd=number in self._odd)
        for at, name in self._aborts:
            if at == step:
                self._abort(name)
        for live in list(self._queue):
            if live.running:
                live.running -= 1
                if not live.running:
                    self._finish(live)
        running = sum(1 for live in self._queue if live.running)
        for live in self._queue:
            if running < MOST_RUNNING and not live.running:
                if live.waiting and live.ticket is not None and not live.request.patient:
                    self._carry_out(self.member.want(live.ticket))
                    if live.waiting and self._plan.config.policy == "best_effort":
                        self.storage.wrong(f"{live.request.name} waits, and is wanted now")
                if not live.waiting:
                    self._run(live)
                    running += 1
        self.member.witness(self.host.stamp << 32 | len(self.host.free))

    def _arrive(self, request: Request, *, odd: bool) -> None:
        if odd:
            self.storage.met["unequal input"] += 1
            request = replace(request, pages=request.pages[:-1])
        live = Live(request, self.host.match(request.pages))
        self._queue.append(live)
        pages = request.pages[live.matched :]
        if pages:
            span = Span(
                request.name, 0, live.matched, len(pages), b"%d" % pages[-1],
                (("swa", "trailing_pages"),) if request.trailing else (),
            )  # fmt: skip
            live.ticket = self.member.submit(span)
            if live.ticket is not None:
                self.spans[live.ticket] = span
        if request.name in self._cancelled:
            self._end(live)
            if live.ticket is not None:
                self.storage.wrong(f"{request.name} has a ticket, and was aborted before it came")
        elif live.ticket is not None:
            self._ask(live, live.ticket, pages)

    def _ask(self, live: Live, ticket: TicketId, pages: Sequence[Page]) -> None:
        request = live.request
        live.waiting = True
        self._by_ticket[ticket] = live
        self._pin(live, request.pages[: live.matched])
        parent = request.pages[live.matched - 1] if live.matched else None
        self.host.expect(ticket, parent, pages)
        self.storage.query(ticket, pages, trailing=request.trailing)

    def _abort(self, name: str) -> None:
        self._carry_out(self.member.abort(name))
        for live in self._queue:
            if live.request.name == name:
                self.storage.met["aborted"] += 1
                self._end(live)
                return
        if name not in self.finished:
            self.storage.met["aborted"] += 1
            self._cancelled.add(name)

    def _run(self, live: Live) -> None:
        matched = live.request.pages[: self.host.match(live.request.pages)]
        self._pin(live, matched)
        live.running = live.request.busy
        if matched:
            nodes = [self.host.nodes[page] for page in matched]
            op = self._issue(Kind.LOAD_BACK, nodes)
            self.storage.copy(Kind.LOAD_BACK, op, [node.slot for node in nodes], matched)

    def _finish(self, live: Live) -> None:
        """Leaves what was computed in the tree, as far as there is room."""
        new: list[Node] = []
        parent: Page | None = None
        for page in live.request.pages:
            if page not in self.host.nodes:
                slots = self.host.allocate(1)
                if slots is None:
                    break
                if not self.host.insert(page, slots[0], parent, written=False):
                    self.host.give(slots[0])
                    break
                new.append(self.host.nodes[page])
                self.host.pin([page], 1)  # or the next one might evict it
            parent = page
        if new:
            pages = [node.page for node in new]
            op = self._issue(Kind.WRITE_THROUGH, new)
            self.host.pin(pages, -1)
            self.storage.copy(Kind.WRITE_THROUGH, op, [node.slot for node in new], pages)
        self._end(live)

    def _end(self, live: Live) -> None:
        self._unpin(live)
        self._queue.remove(live)
        self.finished.append(live.request.name)

    def _pin(self, live: Live, pages: Sequence[Page]) -> None:
        live.pinned = tuple(pages)
        self.host.pin(pages, 1)

    def _unpin(self, live: Live) -> None:
        self.host.pin(live.pinned, -1)
        live.pinned = ()
