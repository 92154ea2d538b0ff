"""`reports`: every rank reports its facts to the leader; nobody waits for anybody.

A report carries the whole table, so it may be lost, late, doubled or overtaken: the leader keeps
the newest of each rank, raw, and decodes it at its next step. A thread of each follower sends one
after a change, at most one an interval, and again each heartbeat: also when nothing is open, as
the leader may wait for the number of the last record in it.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from threading import Thread
from time import sleep
from typing import TYPE_CHECKING, Protocol

from l3store.consensus.agreement import Agreement, Link
from l3store.consensus.wire import Rows, decode_facts, encode_facts
from l3store.errors import ConsensusError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from l3store.consensus.meeting import Meeting

__all__ = ["ReportLink", "Reports"]


class ReportLink(Link, Protocol):
    """A link that also carries reports, which may be lost."""

    def report(self, frame: bytes) -> None:
        """Follower: sends its report; one that cannot go out at once may be dropped."""
        ...

    def reports(self) -> Mapping[int, bytes]:
        """Leader: the newest report of each rank that has sent one since the last call."""
        ...


class Reports(Agreement):
    """The default way to a record."""

    _carries = ("report", "reports")
    _link: ReportLink
    _sent = -1  # version of the table that was reported last
    _sent_at = float("-inf")
    _closed = False
    _thread: Thread | None = None

    @cached_property
    def _rows(self) -> dict[int, Rows]:
        """Of each rank's last report."""
        return defaultdict(Rows)

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
        meeting.hear(self.facts.facts())
        for rank, frame in self._link.reports().items():
            try:
                facts = decode_facts(frame, self._rows[rank])
            except ValueError:
                self.dropped += 1
                continue
            if facts.rank != rank or not meeting.hear(facts):
                self.dropped += 1
