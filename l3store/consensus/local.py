"""All ranks of a group in one process, in virtual time: links whose every delay a seed decides.

Nothing here has a thread or reads a clock. A `Timeline` runs events in the order of their virtual
times; `LocalGroup` carries reports, which may be lost, late, doubled and overtaken, records, which
are reliable and in order, and votes, which pair by their position as in a process group. The
simulation in `l3store.testing.simulation` runs whole engines over it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any

from l3store.errors import ConsensusError

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.consensus.votes import Stream

__all__ = ["LocalGroup", "LocalLink", "Network", "Timeline"]

_VOTE_S = 0.003
"""Virtual seconds after which a stream is asked again whether its vote is due."""


class Timeline:
    """Virtual seconds, and what is to happen in them. Events of one moment run as they were made.

    Attributes:
        now: Virtual seconds since the start.
        rng: The one source of chance.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def after(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Has `action` run `delay` virtual seconds from now."""
        self.at(self.now + delay, action, *args)

    def at(self, moment: float, action: Callable[..., None], *args: Any) -> None:
        """Has `action` run at a moment that is not past."""
        self._made += 1
        heappush(self._events, (moment, self._made, action, args))

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Runs events until `done`, or until that moment, or until there is none.

        Returns:
            Whether it is done.
        """
        while not done():
            if not self._events or self._events[0][0] > until:
                return False
            self.now, _, action, args = heappop(self._events)
            action(*args)
        return True

    def clock(self) -> float:
        """Returns `now`: what takes the place of a monotonic clock."""
        return self.now


@dataclass(frozen=True, slots=True)
class Network:
    """How the links of a group behave; chances are of one report, times in virtual seconds."""

    quick: tuple[float, float] = (0.0001, 0.002)
    """Bounds of the usual delay of a frame."""
    slow: tuple[float, float] = (0.02, 0.3)
    """Bounds of the delay of a delayed one."""
    lost: float = 0.0
    delayed: float = 0.0
    doubled: float = 0.0


class LocalGroup:
    """The wires between the ranks of one group.

    Attributes:
        met: How often each kind of fault was met: ``report lost``, ``report delayed``,
            ``report doubled``, ``report overtaken``, ``record delayed``.
        sent: Reports that left each rank.
        arrived: Called with a rank when something has come in there.
    """

    def __init__(self, timeline: Timeline, ranks: int, network: Network) -> None:
        self.timeline, self.ranks, self.network = timeline, ranks, network
        self.met: Counter[str] = Counter()
        self.arrived: Callable[[int], None] = lambda rank: None
        self.links = [LocalLink(self, rank) for rank in range(ranks)]
        self.sent = [0] * ranks
        self._arrived = [0] * ranks
        self._record_due = [0.0] * ranks
        self._votes: dict[str, list[deque[tuple[bytes, Callable[[list[bytes]], None]]]]] = {}

    def delay(self, *, slow: bool = False) -> float:
        """Returns how long a frame takes."""
        return self.timeline.rng.uniform(*(self.network.slow if slow else self.network.quick))

    def report(self, rank: int, frame: bytes) -> None:
        """A report leaves a rank; what becomes of it is chance."""
        self.sent[rank] += 1
        chance, network = self.timeline.rng.random, self.network
        if chance() < network.lost:
            self.met["report lost"] += 1
            return
        copies = 1
        if chance() < network.doubled:
            self.met["report doubled"] += 1
            copies = 2
        for _ in range(copies):
            slow = chance() < network.delayed
            self.met["report delayed"] += slow
            self.timeline.after(
                self.delay(slow=slow), self._report_arrives, rank, self.sent[rank], frame
            )

    def _report_arrives(self, rank: int, number: int, frame: bytes) -> None:
        if number < self._arrived[rank]:
            self.met["report overtaken"] += 1
        self._arrived[rank] = max(number, self._arrived[rank])
        self.links[0].newest[rank] = frame
        self.links[0].on_arrival()
        self.arrived(0)

    def publish(self, frame: bytes) -> None:
        """A record leaves the leader."""
        for rank in range(1, self.ranks):
            slow = self.timeline.rng.random() < self.network.delayed
            self.met["record delayed"] += slow
            due = self.timeline.now + self.delay(slow=slow)
            self._record_due[rank] = due = max(due, self._record_due[rank])  # in order
            self.timeline.at(due, self._record_arrives, rank, frame)

    def _record_arrives(self, rank: int, frame: bytes) -> None:
        self.links[rank].records.append(frame)
        self.arrived(rank)

    def vote(
        self, purpose: str, rank: int, frame: bytes, take: Callable[[list[bytes]], None]
    ) -> None:
        """A rank's vote waits for those of all others; `take` gets all of them, by rank.

        Votes of one purpose pair by their position, whatever they are about.
        """
        waiting = self._votes.setdefault(purpose, [deque() for _ in range(self.ranks)])
        waiting[rank].append((frame, take))
        while all(waiting):
            votes = [queue.popleft() for queue in waiting]
            frames = [frame for frame, _ in votes]
            for at, (_, each) in enumerate(votes):
                self.timeline.after(self.delay(), self._votes_arrive, at, each, frames)

    def hold(self, rank: int, stream: Stream, refused: Callable[[ConsensusError], None]) -> None:
        """Gives a rank's votes of one purpose to the others, each when it is due.

        It takes the place of the stream's thread, and ends as that does: when votes do not pair.
        """
        self._next_vote(rank, stream, refused, self.timeline.now + stream.patience_s)

    def _next_vote(
        self, rank: int, stream: Stream, refused: Callable[[ConsensusError], None], limit: float
    ) -> None:
        frame = stream.next()
        if frame is None and self.timeline.now < limit:
            self.timeline.after(_VOTE_S, self._next_vote, rank, stream, refused, limit)
            return

        def take(frames: list[bytes]) -> None:
            try:
                stream.take(frames)
            except ConsensusError as error:
                refused(error)
                return
            limit = self.timeline.now + stream.rest_s + stream.patience_s
            self.timeline.after(stream.rest_s, self._next_vote, rank, stream, refused, limit)

        self.vote(stream.purpose, rank, stream.idle() if frame is None else frame, take)

    def _votes_arrive(
        self, rank: int, take: Callable[[list[bytes]], None], frames: list[bytes]
    ) -> None:
        take(frames)
        self.arrived(rank)


class LocalLink:
    """One rank's end of the wires: a `ReportLink` that never blocks."""

    dropped = 0

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.rank, self.ranks = rank, group.ranks
        self.records: deque[bytes] = deque()
        self.newest: dict[int, bytes] = {}
        self.on_arrival: Callable[[], object] = lambda: None
        self._group = group

    def report(self, frame: bytes) -> None:
        """Sends this rank's report."""
        self._group.report(self.rank, frame)

    def reports(self) -> dict[int, bytes]:
        """Returns the report that arrived last of each rank, and forgets them."""
        newest, self.newest = self.newest, {}
        return newest

    def on_report(self, call: Callable[[], object]) -> None:
        """Has `call` run after each report that arrives here."""
        self.on_arrival = call

    def publish(self, frame: bytes) -> None:
        """Sends a record to every other rank."""
        self._group.publish(frame)

    def receive(self) -> bytes | None:
        """Returns the next record, if it has arrived."""
        return self.records.popleft() if self.records else None

    def share(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Not there: who simulates knows what all ranks say."""
        raise NotImplementedError("ranks in virtual time do not join")

    def wait(self, timeout_s: float) -> None:
        """Not there: time passes by events alone."""
        raise NotImplementedError("a rank in virtual time polls")

    def fail(self, error: Exception) -> None:
        """Does nothing: who simulates sees the error itself."""

    def close(self) -> None:
        """Does nothing."""
