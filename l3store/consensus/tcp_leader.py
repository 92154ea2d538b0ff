"""The leader's end of `tcp`: it lets the ranks in, and each of them hears of the others here."""

from __future__ import annotations

import selectors
import socket
from dataclasses import dataclass
from functools import partial
from secrets import token_bytes
from threading import RLock
from time import monotonic, sleep
from typing import TYPE_CHECKING

from l3store.consensus.agreement import PeerLost
from l3store.consensus.frames import COOKIE_BYTES, LIMIT, Channel, Frame, Inbox, pack_frame
from l3store.consensus.tcp_end import COUNT, HELLO, End, Peer, process
from l3store.errors import ConfigError, ConsensusError, L3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from l3store.consensus.values import Config

__all__ = ["Leader"]

_HELLO_BYTES = 1024
_HELLO_S = 5.0
"""A connection that has not said who it is for so long is dropped."""
_BACKLOG = 2 * LIMIT
"""At most so many bytes of records may wait for one rank."""
_GUESTS = 64
"""So many connections may be about to say who they are."""
_AGAIN_S = 0.05
_EVERYWHERE = ("", "0.0.0.0", "::", "*")


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection that has not said who it is."""

    channel: Channel
    until: float


class Leader(End):
    """Rank 0 of a group over TCP. `close` is for any thread, all else for the one that steps.

    Attributes:
        address: What the others connect to. Whoever knows it can join: it is not for logs.
    """

    def __init__(self, config: Config, host: str, port: int) -> None:
        self._listener = _listener(host, port)
        super().__init__(config, 0, token_bytes(COOKIE_BYTES))
        self._who = process()
        self._guests: list[_Guest] = []
        self._claimed: set[int] = set()
        self._counted = self.ranks  # the most that anybody has said
        self._complete = False
        self._sending = RLock()
        """A rank may leave at a record that others do not have yet: its notice comes after it."""
        self._new: dict[int, bytes] = {}
        self._on_report: Callable[[], object] = lambda: None
        self._sent = 0  # shared blobs and records, to each rank
        bound = self._listener.getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.address = f"tcp://{shown}:{bound[1]}/{self._cookie.hex()}"
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread.start()

    def share(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Gives each rank's blob to all, by rank. All ranks call it, in the same order; blocks.

        Raises:
            ConfigError: The blob is too long, or what `TcpLink.connect` says of ranks.
            ConsensusError: A rank did not come; it is named on every rank that did.
        """
        self._check_blob(blob)
        with self._news:
            self._news.wait_for(lambda: self._failure or not self._missing(), timeout_s)
            missing = self._missing()
            if not self._failure and not missing:
                self._complete = True
            elif isinstance(self._failure, ConfigError):  # ranks that are late get it, too
                most = min(timeout_s, self._silence_s)
                self._news.wait_for(lambda: len(self._claimed) >= self._counted - 1, most)
        if missing:
            names = ", ".join(map(self._name, missing))
            text = f"{names} did not come within {timeout_s:g} s"
            self._fail(PeerLost(text, rank=missing[0]))
        self._check()
        blobs = [blob, *(self._peers[rank].blobs.popleft() for rank in range(1, self.ranks))]
        for each in blobs:
            self._send(pack_frame(Frame.SHARED, self._cookie, each))
        return blobs

    def publish(self, frame: bytes) -> None:
        """See `End`."""
        self._check()
        if not self._complete:
            raise ConsensusError("a record is published before the ranks have met: share first")
        if len(frame) > LIMIT:
            raise ConsensusError(f"a record of {len(frame)} bytes; at most {LIMIT} are sent")
        self._send(pack_frame(Frame.RECORD, self._cookie, frame))

    def reports(self) -> Mapping[int, bytes]:
        """See `End`."""
        self._check()
        with self._news:
            found, self._new = self._new, {}
        return found

    def on_report(self, call: Callable[[], object]) -> None:
        """See `End`."""
        self._on_report = call

    def wait(self, timeout_s: float) -> None:
        """Blocks until a new report may be here, or `timeout_s` is over.

        Raises:
            ConsensusError: A rank is lost; it is named.
        """
        with self._news:
            self._news.wait_for(lambda: self._new or self._failure, timeout_s)
        self._check()

    def _missing(self) -> list[int]:
        return [
            rank
            for rank in range(1, self.ranks)
            if rank not in self._peers or not self._peers[rank].blobs
        ]

    def _send(self, data: bytes) -> None:
        with self._sending:
            for peer in self._peers.values():
                channel = peer.records
                if channel and channel.send(data) > _BACKLOG:
                    text = (
                        f"{self._name(peer.rank)} does not take its records: over {_BACKLOG} bytes "
                        f"wait"
                    )
                    self._fail(PeerLost(text, rank=peer.rank))
                    self._check()
            self._sent += 1

    def _sign(self) -> bytes:
        """See `End`. A connection of its own can be dead on its way, and this one alive."""
        return COUNT.pack(self._sent)

    def _tell(self, notice: bytes, urgent: bool) -> None:
        with self._sending:
            for peer in list(self._peers.values()):
                for channel in (peer.reports if urgent else None, peer.records):
                    if channel:
                        channel.send(notice)

    def _part(self, meant: bool) -> None:
        if meant:
            self._tell(self._notice(self._left(0)), urgent=False)
        for peer in list(self._peers.values()):
            channel = peer.reports
            if channel:
                channel.send(pack_frame(Frame.BYE, self._cookie))

    # -- the thread

    def _channels(self) -> Iterator[Channel]:
        for peer in self._peers.values():
            if peer.records:
                yield peer.records
            if peer.reports:
                yield peer.reports

    def _on_frame(self, peer: Peer, kind: int, payload: bytes) -> None:
        if kind == Frame.REPORT:
            with self._news:
                self._new[peer.rank] = payload
                self._news.notify_all()
            self._on_report()
        elif kind == Frame.BLOB:
            with self._news:
                peer.blobs.append(payload)
                self._news.notify_all()
        elif kind == Frame.NOTICE:
            self._fail(self._error(payload))
        elif kind == Frame.BYE:
            peer.bye = True
            self._fail(self._left(peer.rank), urgent=False)
        elif kind != Frame.BEAT:
            self._count(1)

    def _on_records(self, peer: Peer, mask: int) -> None:
        """A follower says nothing here: what can be read is the end, or is wrong."""
        channel = peer.records
        if channel and mask & selectors.EVENT_WRITE:
            channel.flush()
        if channel and mask & selectors.EVENT_READ and channel.read():
            while self._take(peer):  # it may have said why
                pass
            peer.records = None
            self._drop(channel)
            if not peer.bye:
                self._fail(self._lost(peer.rank, "its connection has ended"))

    def _accept(self, mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it is gone again, or no descriptor is free
            sleep(_AGAIN_S)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(sock, Inbox(self._cookie, _HELLO_BYTES), self._wake)
        guest = _Guest(channel, monotonic() + min(_HELLO_S, self._silence_s))
        if len(self._guests) == _GUESTS:
            self._dismiss(self._guests[0])
        self._guests.append(guest)
        self._selector.register(channel, selectors.EVENT_READ, partial(self._on_guest, guest))

    def _judge(self, now: float) -> None:
        super()._judge(now)
        for guest in [guest for guest in self._guests if guest.until <= now]:
            self._dismiss(guest)

    def _dismiss(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._count(1)
        self._drop(guest.channel)

    def _on_guest(self, guest: _Guest, mask: int) -> None:
        if guest not in self._guests:  # it had to make room in this very turn
            return
        channel = guest.channel
        alive = channel.read() >= 0
        try:
            kind, payload = next(channel.inbox.take(), (0, b""))
            wrong = channel.inbox.dropped or (kind and kind != Frame.HELLO)
            wrong = wrong or (kind and len(payload) < HELLO.size)
        except ValueError:
            wrong = True
        if wrong or (not kind and not alive):
            self._dismiss(guest)
        elif kind:
            self._guests.remove(guest)
            self._selector.unregister(channel)
            rank, ranks, which = HELLO.unpack_from(payload)
            self._seat(channel, rank, ranks, which, payload[HELLO.size :].decode(errors="replace"))

    def _seat(self, channel: Channel, rank: int, ranks: int, which: int, who: str) -> None:
        """Gives a process its seat, or tells it, and all others, why it has none."""
        peer = self._peers.get(rank)
        wrong = ""
        if ranks != self.ranks:
            wrong = (
                f"ranks differ: {self.ranks} on {self._name(0)} ({self._who}), {ranks} on rank "
                f"{rank} ({who}); it must be equal on all ranks"
            )
        elif not 0 <= rank < ranks:
            wrong = (
                f"rank {rank} ({who}) is not in a group of {ranks}: 0 to {ranks - 1}; rank 0 is "
                f"{self._who}"
            )
        elif rank == 0 or (peer and (peer.who != who or (peer.reports if which else peer.records))):
            other = peer.who if peer else self._who
            wrong = f"two processes claim {self._name(rank)}: {other} and {who}"
        error: L3Error | None = ConfigError(wrong) if wrong else self._failure
        if error:
            if not self._complete:
                self._fail(error)
            channel.send(self._notice(error))
            channel.shut(socket.SHUT_WR)
            channel.close()
        with self._news:
            self._counted = max(self._counted, ranks)
            if error or which:  # if the group ends now, this process hears why
                self._claimed.add(rank)
                self._news.notify_all()
        if error:
            return
        channel.inbox.limit = LIMIT
        turn = self._serves if which else self._on_records
        if peer is None:
            peer = Peer(rank, who, monotonic())
        channel.send(pack_frame(Frame.WELCOME, self._cookie))
        if which:
            peer.reports = channel
        else:
            peer.records = channel
        with self._news:
            self._peers[rank] = peer
        self._selector.register(channel, selectors.EVENT_READ, partial(turn, peer))

    def _release(self) -> None:
        for guest in self._guests:
            self._drop(guest.channel)
        self._guests.clear()
        super()._release()
        self._listener.close()


def _listener(host: str, port: int) -> socket.socket:
    if host in _EVERYWHERE:
        raise ConfigError(
            f"host={host!r} stands for every interface of the machine; name the one that the "
            f"group uses, or 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_GUESTS)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on host={host!r}, port={port!r}: {error}") from error
    listener.setblocking(False)
    return listener
