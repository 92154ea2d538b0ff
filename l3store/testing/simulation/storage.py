"""The physical half of one rank: its store, its host memory, its calls, and what befalls them.

Every rule of `FactTable` is the I/O side's to keep: a hit once, progress after verification and
without a call in the pages, `leave` when the call has returned, an ack when it has returned.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from l3store.consensus.values import Kind
from l3store.testing.simulation.reads import NEVER, Read

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.consensus.local import Timeline
    from l3store.consensus.table import FactTable
    from l3store.consensus.values import OpId, TicketId
    from l3store.testing.simulation.host import Slot
    from l3store.testing.simulation.plan import Fault, Page, Plan

__all__ = ["PROBE_S", "Storage"]

BREAKER_FAILURES = 3
"""Failed calls in a row at which the breaker opens."""
LATER_S = 1.0
"""Length of a fault above which a rank declines while its query runs, not in place of it."""
PROBE_S = 0.1
"""Virtual seconds between two probes of an open path."""


class Storage:
    """What one rank does with its own store and its own host memory.

    Attributes:
        memory: What each host page holds, by slot; None: nothing known.
        store: What each key of this rank holds.
        wrong: Called with a sentence when something unsafe happens.
        met: How often each kind of fault was met.
        on: L3 is on by this rank's record; the engine sets it.
        hits: (pages, end points) that this rank's queries have said, by ticket.
        runs: (pages, final) that this rank has said of its reads, by ticket.
        running: Calls that have not returned and will.
        openings: Virtual seconds at which the breaker opened.
        paths: (virtual seconds, whether the path is usable from then on), in order.
        stuck_tickets: Tickets with a call that will never return.
        stuck_backups: Backups that will never return.
    """

    read_type: ClassVar[type[Read]] = Read

    def __init__(
        self,
        plan: Plan,
        rank: int,
        timeline: Timeline,
        facts: FactTable,
        wrong: Callable[[str], None],
    ) -> None:
        self.rank, self.facts, self.wrong = rank, facts, wrong
        self.memory: list[Page | None] = [None] * plan.capacity
        pages = {page for request in plan.requests for page in request.pages}
        held = plan.stored[rank] if rank < len(plan.stored) else pages
        self.store: dict[Page, Page | None] = {page: page for page in held}
        self.met: Counter[str] = Counter()
        self.on = False
        self.hits: dict[TicketId, tuple[int, int | None]] = {}
        self.runs: dict[TicketId, tuple[int, bool]] = {}
        self.running = 0
        self.openings: list[float] = []
        self.paths: list[tuple[float, bool]] = [(0.0, True)]
        self.stuck_tickets: set[TicketId] = set()
        self.stuck_backups: set[OpId] = set()
        self._declined: set[TicketId] = set()
        self._left: set[TicketId] = set()  # this rank has said that it will read nothing
        self._plan, self._timeline = plan, timeline
        self._ends = plan.ends[rank] if rank < len(plan.ends) else frozenset(pages)
        self._pace = plan.pace[rank] if rank < len(plan.pace) else 1.0
        self._faults: dict[tuple[str, int], Fault] = {}
        self._outages: list[Fault] = []
        for fault in plan.faults:
            if fault.rank == rank and fault.kind.startswith("outage"):
                self._outages.append(fault)
            elif fault.rank == rank:
                self._faults[fault.kind, fault.number] = fault
        self._calls: Counter[str] = Counter()
        self._busy: Counter[Slot] = Counter()
        """Host pages under calls that have not returned."""
        self._failures = 0
        self._late = 0  # pages under calls past their deadline
        self._ended_ops: dict[tuple[Kind, OpId], bool] = {}
        self._open = False
        self._begun = float("-inf")  # the last call
        self._streams: list[list[OpId]] = [[], []]

    # -- the path to the store

    def freed(self, slot: Slot) -> None:
        """A host page is free for reuse."""
        if self._busy[slot]:
            self.wrong(f"host page {slot} is free under a call that has not returned")

    def busy(self, slot: Slot) -> bool:
        """Whether a call that has not returned is in a host page: this rank alone knows."""
        return self._busy[slot] > 0

    def _call(self, kind: str) -> tuple[Fault | None, bool]:
        """Begins a call: returns what befalls it, and whether it gets through."""
        if not self.on:
            self.wrong(f"a {kind} began while L3 was off")
        number = self._calls[kind]
        self._calls[kind] += 1
        self._begun = self._timeline.now
        for outage in self._outages:
            if outage.at <= self._timeline.now < outage.at + outage.length:
                self.met[outage.kind] += 1
                return outage, False
        for (name, which), fault in self._faults.items():
            if which == number and name.startswith(kind):
                self.met[name] += 1
                return fault, name.endswith(("wrong", "late"))
        return None, True

    def _ended(self, *, ok: bool) -> None:
        """The breaker sees how a call ended."""
        self._failures = 0 if ok else self._failures + 1
        if self._failures >= BREAKER_FAILURES:
            if not self._open:
                self.openings.append(self._timeline.now)
            self._break()
            self.facts.veto()

    def _break(self) -> None:
        """The path is unusable; it is probed until it is not."""
        if not self._open:
            self._open = True
            self._timeline.after(PROBE_S, self._probe)
            self._note_path()

    def _probe(self) -> None:
        """Says ready when the store answers, and no older call can still turn out to be late."""
        now = self._timeline.now
        out = any(outage.at <= now < outage.at + outage.length for outage in self._outages)
        many = self._late > self._plan.config.max_late_pages
        if out or many or now <= self._begun + self._deadline:
            self._timeline.after(PROBE_S, self._probe)
            return
        self._open, self._failures = False, 0
        self.facts.ready()
        self._note_path()

    def _overdue(self, pages: int) -> None:
        """So many more pages are under calls past their deadline; negative: so many came back."""
        self._late += pages
        self.facts.late(pages)
        if pages > 0 and self._late > self._plan.config.max_late_pages:
            self._break()
            self._veto_late()

    def _veto_late(self) -> None:
        """The table has vetoed by itself, but would also be ready by itself: before the probe."""
        self.facts.veto()

    def _note_path(self) -> None:
        if self._open is self.paths[-1][1]:
            self.paths.append((self._timeline.now, not self._open))

    def unusable_s(self) -> float:
        """For how long the path has been unusable: 0 if it is usable."""
        since, usable = self.paths[-1]
        return 0.0 if usable else self._timeline.now - since

    def usable_between(self, since: float, until: float) -> bool:
        """Whether the path was usable at any moment between two."""
        ends = [*[moment for moment, _ in self.paths[1:]], NEVER]
        return any(
            usable and begin <= until and end >= since
            for (begin, usable), end in zip(self.paths, ends, strict=True)
        )

    def _time(self, bounds: tuple[float, float]) -> float:
        return self._timeline.rng.uniform(*bounds) * self._pace

    def _late_by(self, fault: Fault) -> float:
        """How long a call takes that outlasts its deadline."""
        if fault.kind.endswith("never"):
            return NEVER
        if fault.kind.startswith("outage"):
            return max(self._deadline, fault.at + fault.length - self._timeline.now) + 0.01
        return self._deadline + fault.length

    @property
    def _deadline(self) -> float:
        return self._plan.config.deadline_s

    # -- a prefetch

    def query(self, ticket: TicketId, pages: Sequence[Page], *, trailing: bool) -> None:
        """Looks how many pages are stored, and says so once, by its deadline."""
        declined = self._faults.get(("declined", ticket))
        if declined is not None and declined.length > LATER_S:
            # A report may have told of the ticket by then, and of its hit.
            pause = self._time(self._plan.query_s)
            self._timeline.after(pause, self._decline, "declined", ticket)
        elif declined is not None:
            self._decline("declined", ticket)
            return
        leaves = ("evicted", self._calls["query"]) in self._faults
        fault, through = self._call("query")
        took = self._time(self._plan.query_s)
        if fault is None:
            self._timeline.after(took, self._answer, ticket, pages, trailing, leaves)
        elif through or fault.kind.endswith("hanging"):
            self._timeline.after(self._deadline, self._no_answer, ticket)
        else:
            self._timeline.after(took, self._no_answer, ticket)

    def _answer(
        self, ticket: TicketId, pages: Sequence[Page], trailing: bool, leaves: bool
    ) -> None:
        self._ended(ok=True)
        count = 0
        while count < len(pages) and pages[count] in self.store:
            count += 1
        ends = None
        if trailing:
            ends = 1 | sum(2 << at for at in range(count) if pages[at] in self._ends)
        self._say_hit(ticket, count, ends)
        if leaves and count:
            self.met["evicted"] += 1
            del self.store[pages[self._timeline.rng.randrange(count)]]

    def _no_answer(self, ticket: TicketId) -> None:
        self._ended(ok=False)
        self._say_hit(ticket, 0, None)

    def _say_hit(self, ticket: TicketId, count: int, ends: int | None) -> None:
        if ticket not in self._declined:
            self.hits[ticket] = count, ends
        self.facts.hit(ticket, count, ends)
        self._later("declined after its hit", ticket, self._decline)
        self._later("finished early", ticket, self._finish_early)

    def _later(self, kind: str, ticket: TicketId, what: Callable[[str, TicketId], None]) -> None:
        """Has this rank be through with a ticket after a while, or at once, if it is to be."""
        fault = self._faults.get((kind, ticket))
        if fault is not None and fault.length:
            self._timeline.after(fault.length, what, kind, ticket)
        elif fault is not None:
            what(kind, ticket)

    def _decline(self, kind: str, ticket: TicketId) -> None:
        open_ones = self.facts._tickets
        if ticket in open_ones:
            self.met[kind] += 1
            self._declined.add(ticket)
            self.facts.decline(ticket)
            self.ran(ticket, self.runs.get(ticket, (0, False))[0], final=True)
            if ticket not in open_ones or ticket not in self.hits:  # no report tells of a hit
                self.hits[ticket] = 0, 1

    def _finish_early(self, kind: str, ticket: TicketId) -> None:
        if ticket in self.facts._tickets and ticket not in self.runs:
            self.met[kind] += 1
            self._left.add(ticket)
            self.facts.finish(ticket)
            self.ran(ticket, 0, final=True)

    def read(self, ticket: TicketId, pages: Sequence[Page], slots: Sequence[Slot]) -> None:
        """Begins to read pages into slots, several calls in flight."""
        self._later("declined in reading", ticket, self._decline)
        if ticket not in self._left:
            self.read_type(self, ticket, pages, slots).begin()

    def ran(self, ticket: TicketId, pages: int, *, final: bool = False) -> None:
        """Notes what this rank says of its reads; what it says behind its last word is too late."""
        if not self.runs.get(ticket, (0, False))[1]:
            self.runs[ticket] = pages, final

    def joined(self, pages: Sequence[tuple[Page, Slot]]) -> None:
        """Pages of a ticket are in the tree: each must be in its slot, and no call with it."""
        for page, slot in pages:
            if self.memory[slot] != page:
                self.wrong(
                    f"page {page} was settled, and host page {slot} holds {self.memory[slot]}"
                )
            elif self._busy[slot]:
                self.wrong(f"page {page} was settled under a call that has not returned")

    def succeeded(self, kind: Kind, op: OpId) -> bool:
        """Whether an operation has ended well here: this rank alone knows."""
        return self._ended_ops.get((kind, op), False)

    def consumed(self, kind: Kind, op: OpId, *, ok: bool) -> None:
        """An operation has ended for all, by the record: so it has here."""
        ended = self._ended_ops.pop((kind, op), None)
        if ended is None:
            self.wrong(f"{kind.name.lower()} {op} was consumed, and has not ended on this rank")
        elif ok and not ended:
            self.wrong(f"{kind.name.lower()} {op} was consumed as good, and failed on this rank")

    # -- operations

    def copy(self, kind: Kind, op: OpId, slots: Sequence[Slot], pages: Sequence[Page]) -> None:
        """Moves pages between device and host memory; such moves end in the order of issue."""
        self._streams[kind].append(op)
        self._timeline.after(self._time((0.001, 0.02)), self._copied, kind, op, slots, pages)

    def _copied(self, kind: Kind, op: OpId, slots: Sequence[Slot], pages: Sequence[Page]) -> None:
        stream = self._streams[kind]
        if stream[0] != op:  # the stream is not there yet
            self._timeline.after(0.001, self._copied, kind, op, slots, pages)
            return
        stream.pop(0)
        for slot, page in zip(slots, pages, strict=True):
            if kind is Kind.WRITE_THROUGH:
                self.memory[slot] = page
            elif self.memory[slot] != page:
                self.wrong(f"the device was given {self.memory[slot]} for page {page}")
        self._op_ended(kind, op, ok=True)

    def _ack(self, kind: Kind, op: OpId, *, ok: bool) -> None:
        self.facts.ack(kind, op, ok=ok)

    def _op_ended(self, kind: Kind, op: OpId, *, ok: bool) -> None:
        """The call of an operation has returned."""
        self._ended_ops[kind, op] = ok
        self._ack(kind, op, ok=ok)

    def backup(self, op: OpId, pages: Sequence[Page], slots: Sequence[Slot]) -> None:
        """Writes pages to the store. It acks when the call has returned, never before."""
        fault, through = self._call("backup")
        took = self._time(self._plan.read_s)
        if fault is not None and fault.kind not in ("outage", "backup failed"):
            took = self._late_by(fault)
            self._timeline.after(self._deadline, self._backup_overdue, op, len(slots))
        for slot in slots:
            self._busy[slot] += 1
        if took == NEVER:
            self.stuck_backups.add(op)
            return
        self.running += 1
        begun = self._timeline.now
        # The pages are read somewhere in the call: a late one reads late.
        self._timeline.after(took * 0.9, self._written, pages, slots, through)
        self._timeline.after(took, self._backed_up, op, slots, through, begun)

    def _backup_overdue(self, op: OpId, pages: int) -> None:
        """The breaker knows; the operation has not ended."""
        self._ended(ok=False)
        self._overdue(pages)

    def _written(self, pages: Sequence[Page], slots: Sequence[Slot], through: bool) -> None:
        if through:
            for page, slot in zip(pages, slots, strict=True):
                self.store[page] = self.memory[slot]
                if self.memory[slot] != page:
                    self.wrong(f"the store was given {self.memory[slot]} under the key of {page}")

    def _backed_up(self, op: OpId, slots: Sequence[Slot], through: bool, begun: float) -> None:
        for slot in slots:
            self._busy[slot] -= 1
        self.running -= 1
        if self._timeline.now - begun > self._deadline:
            self._overdue(-len(slots))
        else:
            self._ended(ok=through)
        self._op_ended(Kind.BACKUP, op, ok=through)
