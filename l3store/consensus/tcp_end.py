"""What both ends of `tcp` do: one thread that beats, judges silence, and ends the group once."""

from __future__ import annotations

import os
import selectors
import socket
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct
from threading import Condition, Thread, current_thread
from time import monotonic
from typing import TYPE_CHECKING

from l3store.consensus.agreement import PeerLost
from l3store.consensus.frames import LIMIT, Channel, Frame, pack_frame
from l3store.errors import ConfigError, ConsensusError, L3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from l3store.consensus.values import Config

__all__ = ["COUNT", "HELLO", "End", "Peer", "process"]

HELLO = Struct("<qqB")
"""Rank, number of ranks, 0 for records or 1 for reports; who it is follows, as text."""
COUNT = Struct("<Q")
"""In a leader's sign of life: how many frames it has sent to each rank beside the reports."""
_LINGER_S = 0.5
_NOTICE = Struct("<?q")
"""Whether it is a `ConfigError`, and which rank it is about; a text follows."""


def process() -> str:
    """Returns how messages call this process."""
    return f"process {os.getpid()} on {socket.gethostname()[:255]}"


@dataclass(slots=True, eq=False)
class Peer:
    """The other end of two connections."""

    rank: int
    who: str
    heard: float
    """When it gave its last sign of life."""
    records: Channel | None = None
    reports: Channel | None = None
    blobs: deque[bytes] = field(default_factory=deque)
    """Leader: what the rank has given to an all-gather that is not complete."""
    bye: bool = False
    """The end of its connections is meant."""


class End(ABC):
    """One rank's end of the connections. `close` and `fail` may be called by any thread.

    Attributes:
        rank: Of this process; 0 leads.
        ranks: In the group.
        dropped: Frames and connections that were not of this group.
    """

    def __init__(self, config: Config, rank: int, cookie: bytes) -> None:
        self.rank, self.ranks, self.dropped = rank, config.topology.ranks, 0
        self._name = config.topology.name
        self._beat_s, self._silence_s = config.heartbeat_s, config.peer_timeout_s
        self._cookie = cookie
        self._peers: dict[int, Peer] = {}
        self._failure: L3Error | None = None
        self._closing = False
        self._until: float | None = None  # the goodbye is said, and it lasts no longer than to this
        self._news = Condition()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._rouse)
        self._thread = Thread(target=self._run, name="l3store-tcp", daemon=True)

    def close(self) -> None:
        """Leaves the group; the others are told so, and it ends for them. Idempotent.

        Waits half a second at most for what still has to go out.
        """
        with self._news:
            first, meant = not self._closing, self._failure is None
            if first:
                self._closing = True
                self._failure = self._failure or ConsensusError(
                    f"the link of rank {self.rank} is closed"
                )
                self._news.notify_all()
        if first:
            try:
                self._part(meant)
            finally:  # not before: the thread ends connections, and to the others that is a loss
                self._until = monotonic() + _LINGER_S
                self._wake()
        if current_thread() is not self._thread:
            self._thread.join()

    def fail(self, error: PeerLost) -> None:
        """Ends the group for all ranks, who are told the error. Only the first one counts."""
        self._fail(error)

    def publish(self, frame: bytes) -> None:
        """Leader: sends a record to all, in order. Does not wait for a receiver.

        Raises:
            ConsensusError: A rank is lost, or has not taken its records for too long.
        """
        raise ConsensusError(f"rank {self.rank} does not lead: rank 0 publishes")

    def receive(self) -> bytes | None:
        """Follower: the next record, or None if it is not here yet. Does not block.

        Raises:
            ConsensusError: A rank is lost, or has left and all records before have come.
        """
        raise ConsensusError("rank 0 leads: it publishes, and receives nothing")

    def report(self, frame: bytes) -> None:
        """Follower: sends its report; it replaces one that could not go out yet. Never raises."""
        raise ConsensusError("rank 0 leads: it reports to nobody")

    def reports(self) -> Mapping[int, bytes]:
        """Leader: the newest report of each rank that has sent one since the last call.

        Raises:
            ConsensusError: A rank is lost.
        """
        raise ConsensusError(f"rank {self.rank} does not lead: reports go to rank 0")

    def on_report(self, call: Callable[[], object]) -> None:
        """Leader: has the link's thread run `call` after each report that came.

        It neither blocks nor raises.
        """
        raise ConsensusError(f"rank {self.rank} does not lead: reports go to rank 0")

    # -- for the two ends

    @abstractmethod
    def _on_frame(self, peer: Peer, kind: int, payload: bytes) -> None:
        """Takes a frame that came over a connection for reports."""

    @abstractmethod
    def _tell(self, notice: bytes, urgent: bool) -> None:
        """Gives a notice to the others; an urgent one overtakes the records before it."""

    @abstractmethod
    def _part(self, meant: bool) -> None:
        """Says goodbye; `meant`: the group has not ended for another reason before."""

    def _sign(self) -> bytes:
        """What a sign of life says besides."""
        return b""

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _check_blob(self, blob: bytes) -> None:
        self._check()
        most = LIMIT // (2 * self.ranks)
        if len(blob) > most:
            raise ConfigError(f"{len(blob)} bytes are shared; at most {most} are")

    def _fail(self, error: L3Error, *, urgent: bool = True) -> None:
        """Ends the group, here and for the others; only the first reason counts."""
        with self._news:
            if self._failure is not None:
                return
            self._failure = error
            self._news.notify_all()
        self._tell(self._notice(error), urgent)
        self._wake()

    def _lost(self, rank: int, why: str) -> PeerLost:
        return PeerLost(f"{self._name(rank)} is lost: {why}", rank=rank)

    def _left(self, rank: int) -> PeerLost:
        return PeerLost(f"{self._name(rank)} has left the group", rank=rank)

    def _notice(self, error: L3Error) -> bytes:
        rank = getattr(error, "rank", -1)
        text = str(error).encode(errors="replace")
        payload = _NOTICE.pack(isinstance(error, ConfigError), rank) + text
        return pack_frame(Frame.NOTICE, self._cookie, payload)

    @staticmethod
    def _error(notice: bytes) -> L3Error:
        """Returns what a notice says.

        Raises:
            ValueError: It is none.
        """
        if len(notice) < _NOTICE.size:
            raise ValueError("it sends a notice that is too short")
        of_config, rank = _NOTICE.unpack_from(notice)
        text = notice[_NOTICE.size :].decode(errors="replace")
        if of_config:
            return ConfigError(text)
        return PeerLost(text, rank=rank) if rank >= 0 else ConsensusError(text)

    def _channels(self) -> Iterator[Channel]:
        """Those that this thread serves."""
        for peer in self._peers.values():
            if peer.reports:
                yield peer.reports

    # -- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # whatever it is, nobody may go on waiting
            self._fail(ConsensusError(f"the thread of the link has ended: {error!r}"))
        finally:
            self._release()

    def _serve(self) -> None:
        for peer in self._peers.values():
            self._sort(peer)  # what came together with the welcome
        turn = beat_at = monotonic()
        while True:
            for key, mask in self._selector.select(self._pause(beat_at)):
                key.data(mask)
            now = monotonic()
            if now - turn > self._silence_s / 2:  # it was this process that slept
                for peer in self._peers.values():
                    peer.heard = min(peer.heard + now - turn, now)
            turn = now
            self._watch()
            if self._until is not None:
                if self._parted(now):
                    return
            elif self._failure is None:
                if now >= beat_at:
                    beat_at = now + self._beat_s
                    self._beat()
                self._judge(now)

    def _pause(self, beat_at: float) -> float:
        if self._until is not None:
            due = self._until
        elif self._failure is not None:
            return self._beat_s
        else:
            heard = min((peer.heard for peer in self._peers.values()), default=beat_at)
            due = min(beat_at, heard + self._silence_s)
        return max(due - monotonic(), 0.0)

    def _beat(self) -> None:
        beat = pack_frame(Frame.BEAT, self._cookie, self._sign())
        for peer in self._peers.values():
            if peer.reports and not peer.reports.waiting:  # else enough is on its way
                peer.reports.send(beat)

    def _judge(self, now: float) -> None:
        for peer in self._peers.values():
            silent = now - peer.heard
            if silent >= self._silence_s:
                lost = self._lost(peer.rank, f"it was silent for {silent:.1f} s")
                self._fail(self._left(peer.rank) if peer.bye else lost)

    def _watch(self) -> None:
        """Has the selector say when what waits can go out."""
        for channel in self._channels():
            write = selectors.EVENT_WRITE if channel.waiting else 0
            key = self._selector.get_key(channel)
            if key.events != selectors.EVENT_READ | write:
                self._selector.modify(channel, selectors.EVENT_READ | write, key.data)

    def _parted(self, now: float) -> bool:
        """Whether all has gone out, and the others know; if not, it is too late for it."""
        if self._until is None or now >= self._until:
            return True
        if any(channel.waiting for channel in self._channels()):
            return False
        for peer in self._peers.values():
            if peer.reports:
                peer.reports.shut(socket.SHUT_WR)
        return not any(peer.reports for peer in self._peers.values())

    def _serves(self, peer: Peer, mask: int) -> None:
        """Turn of a connection for reports."""
        if peer.reports and mask & selectors.EVENT_WRITE:
            peer.reports.flush()
        if peer.reports and mask & selectors.EVENT_READ:
            self._take(peer)

    def _take(self, peer: Peer) -> bool:
        """Reads a connection for reports once; returns whether there was something."""
        channel = peer.reports
        if channel is None:
            return False
        size = channel.read()
        if size > 0:
            peer.heard = monotonic()
        why = self._sort(peer)
        if size >= 0 and not why:
            return size > 0
        peer.reports = None
        self._drop(channel)
        if not peer.bye:
            self._fail(self._lost(peer.rank, why or "its connection has ended"))
        return False

    def _sort(self, peer: Peer) -> str:
        """Takes the frames that are here; returns what is wrong with the stream, if anything is."""
        channel, why = peer.reports, ""
        if channel:
            try:
                for kind, payload in channel.inbox.take():
                    self._on_frame(peer, kind, payload)
            except ValueError as error:
                why = str(error)
                self._count(1)
            self._count_of(channel)
        return why

    def _drop(self, channel: Channel) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()

    def _rouse(self, mask: int) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _wake(self) -> None:
        """Has the thread take a turn; it may have ended."""
        with suppress(OSError):
            self._waker.send(b".")

    def _release(self) -> None:
        """Closes all that is open: the end of the thread."""
        for peer in self._peers.values():
            for channel in (peer.records, peer.reports):
                if channel:
                    self._drop(channel)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _count(self, frames: int) -> None:
        with self._news:
            self.dropped += frames

    def _count_of(self, channel: Channel) -> None:
        if channel.inbox.dropped:
            self._count(channel.inbox.dropped)
            channel.inbox.dropped = 0
