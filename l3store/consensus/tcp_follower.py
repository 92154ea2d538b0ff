"""A follower's end of `tcp`."""

from __future__ import annotations

import select
import selectors
import socket
from collections import deque
from functools import partial
from math import ceil
from time import monotonic, sleep
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from l3store.consensus.agreement import PeerLost
from l3store.consensus.frames import COOKIE_BYTES, LIMIT, Channel, Frame, Inbox, pack_frame
from l3store.consensus.tcp_end import COUNT, HELLO, End, Peer, process
from l3store.errors import ConfigError, ConsensusError, L3Error

if TYPE_CHECKING:
    from l3store.consensus.values import Config

__all__ = ["Follower"]

_AGAIN_S = 0.05
_GRACE_S = 1.0
"""So much longer a follower waits in `share`: the leader's words name who is missing."""
_MOST = 1 << 31


class Follower(End):
    """Another rank of a group over TCP.

    `report` and `close` are for any thread, all else for the one that steps: it reads the records.
    """

    def __init__(self, address: str, config: Config, rank: int, timeout_s: float) -> None:
        host, port, cookie = _parse(address)
        if isinstance(rank, bool) or not isinstance(rank, int) or abs(rank) > _MOST:
            raise ConfigError(f"rank={rank!r} is no number of a rank")
        super().__init__(config, rank, cookie)
        self.address = address
        self._came: deque[bytes] = deque()
        self._shared: deque[bytes] = deque()
        self._ending: L3Error | None = None  # the group has, after the records that came
        self._got = 0  # shared blobs and records
        self._owed: tuple[int, float] | None = None  # so many were sent, said then; none came since
        peer = self._peers[0] = Peer(0, "", 0.0)
        try:
            self._records = peer.records = self._enter(host, port, 0, timeout_s)
            self._reports = peer.reports = self._enter(host, port, 1, timeout_s)
        except BaseException:
            self._release()
            raise
        self._poller = select.poll()
        self._poller.register(self._records, select.POLLIN)
        self._selector.register(self._reports, selectors.EVENT_READ, partial(self._serves, peer))
        peer.heard = monotonic()
        self._sort_records()  # what came together with the welcome
        self._thread.start()

    def share(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Gives each rank's blob to all, by rank. All ranks call it, in the same order; blocks.

        Raises:
            ConfigError: The blob is too long, or what `TcpLink.connect` says of ranks.
            ConsensusError: A rank did not come; it is named on every rank that did.
        """
        self._check_blob(blob)
        self._reports.send(pack_frame(Frame.BLOB, self._cookie, blob))
        until = monotonic() + timeout_s + _GRACE_S
        while len(self._shared) < self.ranks:
            if self._ending:
                self._fail(self._ending)
            self._check()
            left = until - monotonic()
            if left <= 0:
                text = f"{self._name(0)} has not brought the ranks together in {timeout_s:g} s"
                self._fail(PeerLost(text, rank=0))
                continue
            self._poller.poll(ceil(left * 1000))
            self._pull()
        return [self._shared.popleft() for _ in range(self.ranks)]

    def receive(self) -> bytes | None:
        """See `End`."""
        self._check()
        if not self._came:
            self._pull()
        if self._came:
            return self._came.popleft()
        if self._ending:
            self._fail(self._ending)
        self._check()
        return None

    def wait(self, timeout_s: float) -> None:
        """Blocks until a record may be here, or `timeout_s` is over.

        Raises:
            ConsensusError: A rank is lost; it is named.
        """
        self._check()
        if not self._came and not self._ending:
            self._poller.poll(ceil(timeout_s * 1000))
            self._check()

    def report(self, frame: bytes) -> None:
        """See `End`."""
        if self._failure is None:
            self._reports.latest(pack_frame(Frame.REPORT, self._cookie, frame))

    def _pull(self) -> None:
        """Reads what is here of the records; does not block."""
        size = self._records.read()
        why = self._sort_records() if size else ""
        owed = self._owed
        if size:
            self._owed = None
        elif owed and owed[0] > self._got and monotonic() - owed[1] >= self._silence_s:
            why = f"{owed[0]} frames were sent, and {self._got} have come; its connection is dead"
        if why or size < 0:
            self._ending = self._ending or self._lost(0, why or "its connection has ended")

    def _sort_records(self) -> str:
        """Takes the frames that are here; returns what is wrong with the stream, if anything is."""
        inbox = self._records.inbox
        try:
            for kind, payload in inbox.take():
                if kind == Frame.RECORD:
                    self._came.append(payload)
                    self._got += 1
                elif kind == Frame.SHARED:
                    self._shared.append(payload)
                    self._got += 1
                elif kind == Frame.NOTICE:
                    self._ending = self._ending or self._error(payload)
                else:
                    self._count(1)
        except ValueError as error:
            self._count(1)
            return str(error)
        finally:
            self._count_of(self._records)
        return ""

    def _enter(self, host: str, port: int, which: int, timeout_s: float) -> Channel:
        """Makes one of the two connections; blocks."""
        until = monotonic() + timeout_s
        hello = HELLO.pack(self.rank, self.ranks, which) + process().encode()
        while True:
            try:
                sock = socket.create_connection((host, port), max(until - monotonic(), _AGAIN_S))
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    inbox = Inbox(self._cookie, LIMIT)
                    sock.sendall(pack_frame(Frame.HELLO, self._cookie, hello))
                    kind, payload = _answer(sock, inbox, until)
                    if kind == Frame.NOTICE:
                        raise self._error(payload)
                    return Channel(sock, inbox, self._wake)
                except BaseException:
                    sock.close()
                    raise
            except OSError as error:
                if monotonic() + _AGAIN_S >= until:
                    raise ConsensusError(
                        f"{self._name(0)} cannot be reached at {host}, port {port}, in "
                        f"{timeout_s:g} s: {error}"
                    ) from error
            sleep(_AGAIN_S)

    def _tell(self, notice: bytes, urgent: bool) -> None:
        self._reports.send(notice)
        self._records.shut(socket.SHUT_RD)  # wakes the thread that waits for a record

    def _part(self, meant: bool) -> None:
        self._reports.send(pack_frame(Frame.BYE, self._cookie))
        self._records.shut(socket.SHUT_RD)

    # -- the thread

    def _on_frame(self, peer: Peer, kind: int, payload: bytes) -> None:
        if kind == Frame.NOTICE:
            self._fail(self._error(payload))
        elif kind == Frame.BYE:
            peer.bye = True
        elif kind == Frame.BEAT and len(payload) == COUNT.size:
            (sent,) = COUNT.unpack(payload)
            owed = self._owed
            if sent > self._got and (owed is None or owed[0] <= self._got):
                self._owed = sent, monotonic()
        else:
            self._count(1)


def _answer(sock: socket.socket, inbox: Inbox, until: float) -> tuple[int, bytes]:
    """Returns the leader's answer to a hello; blocks."""
    while True:
        sock.settimeout(max(until - monotonic(), _AGAIN_S))
        data = sock.recv(4096)
        inbox.feed(data)
        try:
            found = next(inbox.take(), None)
        except ValueError as error:
            raise ConnectionError(f"{error}: it is no leader of a group") from error
        if found and found[0] in (Frame.WELCOME, Frame.NOTICE):
            return found
        if found or not data:
            raise ConnectionError(
                "it does not know this address; it may be that of another group, or its L3Store of "
                "another version"
            )


def _parse(address: str) -> tuple[str, int, bytes]:
    try:
        parts = urlsplit(address)
        host, port, cookie = parts.hostname, parts.port, bytes.fromhex(parts.path[1:])
    except (ValueError, AttributeError):
        host = port = None
        cookie = b""
    if not host or not port or len(cookie) != COOKIE_BYTES:
        raise ConfigError("that is no address of a group; it is what `address` of its leader says")
    return host, port, cookie
