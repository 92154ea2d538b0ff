"""`reports`: every rank reports its facts to the leader; nobody waits for anybody.

A report carries the whole table, so it may be lost, late, doubled or overtaken: the leader keeps
the newest of each rank. A thread of each follower sends one after a change, at most one an
interval, and again each heartbeat: also when nothing is open, as the leader may wait for the number
of the last record in it.

The leader decides ahead: while the thread that steps is elsewhere, the link's thread reads what has
come and makes the news of the next record, and a step adds only its number and clock. It looks by
itself where that was an interval ago, or it has to wait: so no fact is later by more than that, and
a leader with long steps reads at them.
"""

from __future__ import annotations

from collections import defaultdict
from threading import Lock, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Protocol

from l3store.consensus.agreement import Agreement, Link
from l3store.consensus.meeting import join
from l3store.consensus.values import Record
from l3store.consensus.wire import Rows, decode_facts, encode_facts
from l3store.errors import ConsensusError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from l3store.consensus.meeting import Meeting
    from l3store.consensus.protocol import Machine
    from l3store.consensus.values import Config

__all__ = ["ReportLink", "Reports"]


class ReportLink(Link, Protocol):
    """A link that also carries reports, which may be lost."""

    def report(self, frame: bytes) -> None:
        """Follower: sends its report; one that cannot go out at once may be dropped."""
        ...

    def reports(self) -> Mapping[int, bytes]:
        """Leader: the newest report of each rank that has sent one since the last call."""
        ...

    def on_report(self, call: Callable[[], object]) -> None:
        """Leader: has a thread of the link run `call` after each report that came; never raises."""
        ...


class Reports(Agreement):
    """The default way to a record."""

    _carries = ("report", "reports", "on_report")
    _link: ReportLink

    def __init__(
        self,
        link: ReportLink,
        config: Config,
        incarnation: int,
        capacity_pages: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(link, config, incarnation, capacity_pages, clock)
        self._sent, self._sent_at = -1, float("-inf")  # version of the table that was reported last
        self._rows = defaultdict[int, Rows](Rows)  # of each rank's last report
        self._hearing = Lock()  # who holds it may use the meeting
        self._heard_at = float("-inf")
        self._rest_s = 0.0  # so long after it a step need not hear again, if another thread does
        self._heard = False  # by this step
        self._ahead = 0  # so often may be decided ahead before the next step
        self._machine: Machine | None = None
        self._news: Record | None = None  # that was decided ahead
        self._failure: Exception | None = None  # of deciding ahead
        self._closed = False
        self._thread: Thread | None = None

    def pump(self) -> float:
        """Sends a report if it is time for one: a turn of the reporting thread.

        Returns:
            Seconds until the next turn is due, if the table does not change before.
        """
        now = self._clock()
        version = self.facts.version
        since = now - self._sent_at
        interval, heartbeat = self.config.interval_s, self.config.heartbeat_s
        least = heartbeat if version == self._sent else interval
        if since < least:
            return least - since
        self._sent, self._sent_at = version, now
        self._link.report(encode_facts(self.facts.facts()))
        return interval

    def decide_ahead(self) -> bool:
        """Leader: reads what has come, and makes the news of the next record: by the link's thread.

        Never raises, and does not block: it leaves all that to a step that runs.

        Returns:
            Whether it has.
        """
        meeting = self._meeting
        if meeting is None or not self._hearing.acquire(blocking=False):
            return False
        try:
            # Where the last record was applied only inputs change the machine, until the next one.
            if (
                self._ahead  # it is set last
                and (made := self._made)
                and (machine := self._machine)
                and made.number == machine.number == self.facts.number
            ):
                self._ahead -= 1
                self._rest_s = self.config.interval_s
                self._listen(meeting)
                self._decide(meeting, machine)
                return True
        except Exception as error:  # the next step raises it, and not what may come of it
            self._failure, self._ahead = error, 0
        finally:
            self._hearing.release()
        return False

    def close(self) -> None:
        """Leaves the group; idempotent."""
        self._closed = True
        self.facts.wake()
        if self._thread:
            self._thread.join()
        super().close()

    def _start(self) -> None:
        if self.rank:
            self._thread = Thread(target=self._run, name="l3store-reports", daemon=True)
            self._thread.start()
        else:
            self._link.on_report(self.decide_ahead)

    def _run(self) -> None:
        try:
            while not self._closed:
                pause = self.pump()
                if self.facts.version != self._sent:  # too early for the next one
                    sleep(pause)
                else:
                    self.facts.wait(self._sent, pause)
        except Exception as error:
            # Or the leader would wait for the reports of a rank that beats.
            self.fail(ConsensusError(f"its reports have stopped: {error!r}"))
            raise

    def _hear(self, meeting: Meeting) -> None:
        with self._hearing:
            self._ahead = 0  # until this step has its record, no other thread hears
            if self._failure is not None:
                raise self._failure
            made = self._made
            self._heard = (
                made is None
                or self._clock() - self._heard_at >= self._rest_s
                or meeting.applied() <= made.number - self.config.window
            )
            if self._heard:
                self._listen(meeting)

    def _make(self, meeting: Meeting, machine: Machine) -> Record:
        record = super()._make(meeting, machine)
        self._machine, self._ahead = machine, self.config.topology.ranks - 1
        return record

    def _next(self, meeting: Meeting, machine: Machine) -> Record:
        if self._heard:
            self._decide(meeting, machine)
        number, now = machine.number + 1, self._clock()
        news, self._news = self._news, None
        if news is None:
            return Record(number, now, machine.epoch, machine.storage_on)
        tickets = machine.tickets  # an input may have ended one since
        rows = {ticket: row for ticket, row in news.rows.items() if ticket in tickets}
        return Record(number, now, news.epoch, news.storage_on, rows, news.acks)

    def _decide(self, meeting: Meeting, machine: Machine) -> None:
        """Adds to the news."""
        record = meeting.decide(machine, self._clock())
        self._news = join(self._news, record) if self._news else record

    def _listen(self, meeting: Meeting) -> None:
        """Hears what is new of all ranks."""
        self._take(meeting)
        meeting.hear(self.facts.facts())
        self._heard_at = self._clock()

    def _take(self, meeting: Meeting) -> None:
        """Gives the meeting the reports that have come."""
        for rank, frame in self._link.reports().items():
            try:
                facts = decode_facts(frame, self._rows[rank])
            except ValueError:
                self.dropped += 1
                continue
            if facts.rank != rank or not meeting.hear(facts):
                self.dropped += 1
