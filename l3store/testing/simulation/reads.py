"""The read calls of one ticket on one rank: several in flight, verified, each with a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.consensus.values import TicketId
    from l3store.testing.simulation.host import Slot
    from l3store.testing.simulation.plan import Page
    from l3store.testing.simulation.storage import Storage

__all__ = ["NEVER", "Read"]

AHEAD = 2
"""Read calls of one ticket in flight."""
NEVER = float("inf")


class Read:
    """The read calls of one ticket on one rank."""

    def __init__(
        self, storage: Storage, ticket: TicketId, pages: Sequence[Page], slots: Sequence[Slot]
    ) -> None:
        self._storage, self._ticket, self._pages, self._slots = storage, ticket, pages, slots
        self._batch = storage._plan.config.batch_pages
        self._next = 0  # page that the next call begins with
        self._good: set[int] = set()  # pages that are read and verified
        self._said = 0
        self._refused = False  # no further call may begin
        self._stopped = False
        storage.ran(ticket, 0)

    def begin(self) -> None:
        """Starts the first calls."""
        for _ in range(AHEAD):
            self._start_one()

    def _start_one(self) -> None:
        storage, first = self._storage, self._next
        if self._stopped or self._refused or first >= len(self._pages):
            return
        if not storage.facts.enter(self._ticket):
            self._refused = True
            return
        self._next = last = min(first + self._batch, len(self._pages))
        for at in range(first, last):
            storage._busy[self._slots[at]] += 1
            storage.memory[self._slots[at]] = None
        said_later = storage._faults.get(("said later", storage._calls["read"]))
        fault, through = storage._call("read")
        took = storage._time(storage._plan.read_s)
        late = fault is not None and fault.kind.endswith(("late", "never", "hanging"))
        if late:
            assert fault is not None
            took = storage._late_by(fault)
            storage._timeline.after(storage._deadline, self._overdue, first, last)
        if took == NEVER:
            storage.stuck_tickets.add(self._ticket)
            return
        storage.running += 1
        wrong = fault is not None and fault.kind == "read wrong"
        storage._timeline.after(took * 0.9, self._arrive, first, last, through, wrong)
        pause = said_later.length if said_later else 0.0
        storage._timeline.after(took, self._returned, first, last, through, wrong, late, pause)

    def _overdue(self, first: int, last: int) -> None:
        """The call has ended for the protocol, and is still in its pages."""
        self._stop()
        self._storage._ended(ok=False)
        self._storage._overdue(last - first)

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._storage.facts.finish(self._ticket)
            self._storage.ran(self._ticket, self._said, final=True)

    def _say(self, done: int) -> None:
        self._said = done
        self._storage.ran(self._ticket, done)
        self._storage.facts.progress(self._ticket, done)

    def _run(self) -> int:
        """Contiguous pages from the start that are good: nothing behind a hole counts."""
        done = 0
        while done in self._good:
            done += 1
        return done

    def _arrive(self, first: int, last: int, through: bool, wrong: bool) -> None:
        storage = self._storage
        for at in range(first, last):
            page = self._pages[at]
            if not through or wrong or page not in storage.store:
                break
            storage.memory[self._slots[at]] = storage.store[page]

    def _returned(
        self, first: int, last: int, through: bool, wrong: bool, late: bool, pause: float
    ) -> None:
        storage = self._storage
        for at in range(first, last):
            storage._busy[self._slots[at]] -= 1
        storage.running -= 1
        if late:
            storage._overdue(first - last)
            storage.facts.leave(self._ticket)
            return
        storage._ended(ok=through)
        good = range(first, last) if through and not wrong else ()
        self._good.update(at for at in good if storage.memory[self._slots[at]] == self._pages[at])
        if storage._plan.early and not pause:
            self._tell(first, last)
            storage.facts.leave(self._ticket)
            return
        storage.facts.leave(self._ticket)
        if pause:
            storage.met["said later"] += 1
            storage.running += 1
            storage._timeline.after(pause, self._tell_later, first, last)
        else:
            self._tell(first, last)

    def _tell_later(self, first: int, last: int) -> None:
        """The thread of a call was not on the processor: much may have been decided since."""
        self._storage.running -= 1
        self._tell(first, last)

    def _tell(self, first: int, last: int) -> None:
        if self._stopped:
            return
        done = self._run()
        self._say(done)
        if not all(at in self._good for at in range(first, last)) or done == len(self._pages):
            self._stop()
        else:
            self._start_one()
