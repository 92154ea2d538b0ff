"""`collective`: ranks gather their votes, as engines do today, and the leader meets them all.

Hits, progress and all else go round in all-gathers of fixed-size frames: one group and one thread
for each purpose, so that no two can pair with each other. Every rank owes every vote, so one call
that hangs holds up the votes of every later ticket until its deadline; `reports` has no such queue.
"""

from __future__ import annotations

from threading import Condition, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, ClassVar, Protocol

from l3store.consensus.agreement import Agreement, Link
from l3store.consensus.beats import Left
from l3store.consensus.state import Said, State
from l3store.consensus.votes import Hits, Progress, VoteTable
from l3store.errors import ConsensusError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from l3store.consensus.meeting import Meeting
    from l3store.consensus.protocol import Machine
    from l3store.consensus.table import FactTable
    from l3store.consensus.values import Config, Record
    from l3store.consensus.votes import Stream

__all__ = ["Collective", "GatherLink"]


class GatherLink(Link, Protocol):
    """A link whose ranks can also gather frames, for several purposes at once."""

    def gather(self, purpose: str, frame: bytes) -> list[bytes]:
        """Gives each rank's frame to all, by rank; blocks until every rank has called.

        One thread a purpose calls it. All frames of a purpose have one length.

        Raises:
            ConsensusError: A rank is lost, or the length is not that of the frames before.
        """
        ...


class Collective(Agreement):
    """The way to a record of engines that bring process groups and nothing else.

    Attributes:
        streams: What this rank votes on, by purpose. Each is driven by a thread of its own after
            `join`; a simulator, which makes the object itself, calls `next` and `take` instead.
    """

    _table: ClassVar[type[FactTable]] = VoteTable
    _carries = ("gather",)
    _link: GatherLink
    facts: VoteTable

    def __init__(
        self,
        link: GatherLink,
        config: Config,
        incarnation: int,
        capacity_pages: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(link, config, incarnation, capacity_pages, clock)
        self._said = Said(self.facts, config, incarnation) if link.rank == 0 else None
        self.streams: Mapping[str, Stream] = {
            kind.purpose: kind(self.facts, config, link.rank, self._said)
            for kind in (Hits, Progress, State)
        }
        self._turn = Condition()
        self._rounds = self._heard = 0
        self._failure: ConsensusError | None = None
        self._closed = False

    def accept(self, data: bytes) -> Record:
        """Takes a record that was carried by the engine.

        Raises:
            ConsensusError: As `Agreement.accept`, or votes do not pair, or a rank is lost; not
                that one has left, as this record was made before.
        """
        if not isinstance(self._failure, Left):
            self._check()
        return super().accept(data)

    def close(self) -> None:
        """Leaves the group; idempotent."""
        self._closed = True
        self.facts.wake()
        super().close()

    def _start(self) -> None:
        for purpose, stream in self.streams.items():
            Thread(
                target=self._run, args=(stream,), name=f"l3store-votes-{purpose}", daemon=True
            ).start()

    def _run(self, stream: Stream) -> None:
        try:
            while not self._closed:
                frame = self._owed(stream)
                stream.take(self._link.gather(stream.purpose, frame))
                with self._turn:
                    self._rounds += 1
                    self._turn.notify_all()
                sleep(stream.rest_s)
        except ConsensusError as error:
            self._fail(error)
        except Exception as error:
            failure = ConsensusError(f"votes on {stream.purpose} have stopped: {error!r}")
            failure.__cause__ = error
            self._fail(failure)

    def _owed(self, stream: Stream) -> bytes:
        """Returns the next vote; blocks until it is due, at most the patience of the stream."""
        limit = monotonic() + stream.patience_s
        while True:
            version = self.facts.version
            frame = stream.next()
            if frame is not None:
                return frame
            left = limit - monotonic()
            if left <= 0 or self._closed:
                return stream.idle()
            self.facts.wait(version, left)

    def _fail(self, error: ConsensusError) -> None:
        with self._turn:
            self._failure = self._failure or error
            self._turn.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _poll(self, machine: Machine) -> Record | None:
        failure = self._failure  # read before the link is asked: no record comes after it
        if not isinstance(failure, Left):
            self._check()
        record = super()._poll(machine)
        if record is None and failure is not None:
            raise failure
        return record

    def _hear(self, meeting: Meeting) -> None:
        self._check()
        self._heard = self._rounds
        if self._said is not None:
            for facts in self._said.facts():
                meeting.hear(facts)

    def _wait(self, timeout_s: float) -> None:
        if self._said is None:
            super()._wait(timeout_s)
            return
        with self._turn:
            self._turn.wait_for(
                lambda: self._rounds != self._heard or self._failure is not None, timeout_s
            )
        super()._wait(0)
