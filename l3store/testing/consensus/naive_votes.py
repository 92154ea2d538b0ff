"""What engines do in place of an agreement: nothing, votes that pair by position, counts to pop.

Each is an `Agreement` of the same machine, table and links as the right ones, so that a script runs
under both and only the policy object differs. None of them checks anything.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import count
from struct import Struct
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from l3store.consensus.agreement import Agreement
from l3store.consensus.meeting import Meeting
from l3store.consensus.values import UNLIMITED, Acks, Bounds, Kind, Record, Topology
from l3store.consensus.wire import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from typing import Any, Self

    from l3store.consensus.agreement import Link
    from l3store.consensus.protocol import Machine
    from l3store.consensus.values import Config, OpId, Row, TicketId

__all__ = [
    "Alone",
    "LeaderCounts",
    "OneGroup",
    "Thread",
    "UncheckedCounts",
    "Voting",
    "pack_vote",
    "unpack_vote",
]

_VOTE = Struct("<q")
_LOOK_AGAIN_S = 0.005


def pack_vote(value: int) -> bytes:
    """Returns a vote as bytes: one number, and nothing that says what it is about."""
    return _VOTE.pack(value)


def unpack_vote(frame: bytes) -> int:
    """Returns the number of a vote."""
    value: int = _VOTE.unpack(frame)[0]
    return value


class Alone(Agreement):
    """No agreement: each rank decides on its own facts, by its own clock."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        alone = replace(self.config, topology=Topology(1))
        self._own = Meeting(alone, self._incarnation)

    @classmethod
    def join(cls, link: Link, config: Config, capacity_pages: int, timeout_s: float = 60.0) -> Self:
        """Meets nobody: this rank's capacity is its own."""
        return cls(link, config, 0, capacity_pages)

    def share(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Shares nothing: this rank goes by what it has."""
        return [blob] * self.config.topology.ranks

    def poll(self, machine: Machine) -> Record | None:
        """Returns what this rank alone would decide."""
        return self.own_record(machine)

    def own_record(self, machine: Machine) -> Record:
        """Makes the next record of this rank's facts."""
        self._own.hear(replace(self.facts.facts(), rank=0))
        return self._own.decide(machine, self._clock())

    def finished(self, kind: Kind, consumed: OpId) -> list[OpId]:
        """Returns this rank's list of operations that have ended and were not consumed."""
        floor, _ = self.facts.facts().acked[kind]
        return list(range(consumed, floor))

    def _start(self) -> None:
        pass

    def _hear(self, meeting: Meeting) -> None:
        pass


class UncheckedCounts(Alone):
    """The leader drains its own queue, tells the others how many, and they pop as many of theirs.

    A rank that is slower has fewer: ``IndexError: pop from empty list``.
    """

    def poll(self, machine: Machine) -> Record | None:
        """Leader: its own record. Others: theirs, with the leader's counts."""
        if self.rank == 0:
            record = self.own_record(machine)
            self._link.publish(encode_record(record))
            return record
        data = self._link.receive()
        if data is None:
            return None
        record = self.taken(data)
        own = self.own_record(machine)
        acks = []
        for kind in Kind:
            queue = self.finished(kind, machine.ops[kind].ended.floor)
            acks.append(Acks(tuple([queue.pop(0) for _ in record.acks[kind].ended])))
        return replace(own, number=record.number, acks=tuple(acks))

    def taken(self, data: bytes) -> Record:
        """Reads what the leader has sent."""
        return decode_record(data)


class LeaderCounts(UncheckedCounts):
    """The same leader; the others hold what it says against what they have reached."""

    def taken(self, data: bytes) -> Record:
        """Reads what the leader has sent; more than this rank has is a `ConsensusError`."""
        record = decode_record(data)
        self.facts.check(replace(record, rows={}))
        return record


Thread: TypeAlias = "Generator[tuple[str, str, int] | None, int, None]"
"""A thread of an engine: it yields (purpose, what, value) of a vote and is sent the MIN; None: it
has to look again later."""


class Voting(Alone):
    """One MIN all-reduce for each thing, paired by position, as engines write them.

    The scheduler: a broadcast of requests each step, then, *if its own list is not empty*, a vote
    on how many writes have ended. The I/O thread: for each ticket in this rank's own order a vote
    on the hit, then one on the pages of each batch, *until its own read has ended early*.

    Attributes:
        groups: Which process group the votes of a purpose go through.
        skips_empty: Whether a vote on writes is skipped where this rank's list is empty.
        exits_early: Whether a rank that reads nothing more leaves out its votes on later batches.
        made: What this rank has voted on in each group, in order.
        heard: (what, MIN) in that order.
    """

    groups: ClassVar[Mapping[str, str]] = {"requests": "requests", "acks": "acks", "io": "io"}
    skips_empty: ClassVar[bool] = True
    exits_early: ClassVar[bool] = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made: dict[str, list[str]] = {}
        self.heard: list[tuple[str, int]] = []
        self._records: deque[Record] = deque()
        self._deciding = False
        self._reached: dict[TicketId, tuple[int, int, bool]] = {}
        self._vote: Callable[[str, bytes, Callable[[bytes], None]], None]
        self._later: Callable[..., None]

    def begin(
        self,
        vote: Callable[[str, bytes, Callable[[bytes], None]], None],
        later: Callable[..., None],
    ) -> None:
        """Starts the I/O thread.

        Args:
            vote: Given a group, a vote and what to call with the lowest vote.
            later: Given seconds, an action and its arguments.
        """
        self._vote, self._later = vote, later
        self._drive(self._io())

    def poll(self, machine: Machine) -> Record | None:
        """Returns the record that this rank makes of what was voted, when it was."""
        if self._records:
            self._deciding = False
            return self._records.popleft()
        if not self._deciding:
            self._deciding = True
            self._drive(self._scheduler(machine))
        return None

    def _drive(self, thread: Thread, answer: int | None = None) -> None:
        """Lets a thread run until it waits."""
        try:
            wanted = thread.send(answer)  # type: ignore[arg-type]
        except StopIteration:
            return
        if wanted is None:
            self._later(_LOOK_AGAIN_S, self._drive, thread)
            return
        purpose, what, value = wanted

        def take(frame: bytes) -> None:
            lowest = unpack_vote(frame)
            self.heard.append((what, lowest))
            self._drive(thread, lowest)

        group = self.groups[purpose]
        self.made.setdefault(group, []).append(what)
        self._vote(group, pack_vote(value), take)

    def _scheduler(self, machine: Machine) -> Thread:
        yield "requests", "requests", machine.number
        kind = Kind.WRITE_THROUGH
        queue = self.finished(kind, machine.ops[kind].ended.floor)
        ended = 0
        if queue or not self.skips_empty:
            ended = yield "acks", "acks", len(queue)
        acks = {kind: Acks(tuple(range(queue[0], queue[0] + ended)))} if ended else {}
        own = self.own_record(machine)
        rows = self._rows()
        bounds = {
            ticket: Bounds(hit, hit, done, done if final else UNLIMITED, 0, rows[ticket].quiet)
            for ticket, (hit, done, final) in self._reached.items()
            if ticket in machine.tickets and ticket in rows
        }
        changed = {t: each for t, each in bounds.items() if each != machine.tickets[t].bounds}
        self._records.append(
            replace(own, rows=changed, acks=tuple(acks.get(each, Acks()) for each in Kind))
        )

    def _io(self) -> Thread:
        for ticket in count():
            while (row := self._rows().get(ticket)) is None or row.hit == UNLIMITED:
                yield None  # for the storage call to return, without a deadline
            hit = yield "io", f"hit of {ticket}", row.hit
            self._reached[ticket] = hit, 0, False
            done = 0
            for number, due in enumerate(self._batches(hit)):
                while row is not None and row.done < due and not row.final:
                    yield None
                    row = self._rows().get(ticket)
                if row is None or (self.exits_early and row.done < due):
                    break  # the others still wait for its further votes
                done = max(done, (yield "io", f"batch {number} of {ticket}", row.done))
                self._reached[ticket] = hit, min(done, hit), False
            self._reached[ticket] = hit, min(done, hit), True

    def _batches(self, hit: int) -> list[int]:
        size = self.config.batch_pages
        return [min(end, hit) for end in range(size, hit + size, size)]

    def _rows(self) -> dict[TicketId, Row]:
        return {row.ticket: row for row in self.facts.facts().rows}


class OneGroup(Voting):
    """All votes but the broadcast go through one process group, from two threads."""

    groups: ClassVar[Mapping[str, str]] = {"requests": "requests", "acks": "all", "io": "all"}
