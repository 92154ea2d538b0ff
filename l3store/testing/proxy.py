"""`Proxy`: a bad network between a client and a real server, on 127.0.0.1."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

__all__ = ["Proxy"]

_HOST = "127.0.0.1"
_CHUNK = 64 * 1024
_NAP = 0.005  # seconds between two looks at the allowance of `slow`
_RESET = struct.pack("ii", 1, 0)  # struct linger: close() sends RST
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

Side = Literal["client", "server"]


class Proxy:
    """Forwards TCP connections to a server, until it is told to do worse.

    One thread serves all connections. Each method below has taken effect when it returns, may be
    called from any thread, and does not wait for the network.

    Args:
        target: ``(host, port)``, or the path of a unix socket.
        buffer_bytes: What the kernel keeps for each socket (it doubles it), so that a client
            notices soon that nobody reads; None for its defaults, which are megabytes.
    """

    def __init__(
        self, target: tuple[str, int] | str | os.PathLike[str], *, buffer_bytes: int | None = None
    ) -> None:
        self._target, self._buffer_bytes = target, buffer_bytes
        # Bound and never listening: the port stays ours while nobody may connect.
        self._holder = self._bound(0)
        self.port: int = self._holder.getsockname()[1]
        self.accepted = 0
        """Connections that clients have made so far."""
        self.passed: dict[Side, int] = {"client": 0, "server": 0}
        """Bytes handed on so far, by the side that got them."""
        self._links: set[_Link] = set()
        self._listener: socket.socket | None = None
        self._frozen = False
        self._rate: float | None = None
        self._allowance: dict[Side, float] = {"client": 0.0, "server": 0.0}
        self._filled_at = 0.0
        self._cut: dict[Side, int | None] = {"client": None, "server": None}
        self._cut_each: dict[Side, int | None] = {"client": None, "server": None}
        self._garbled: dict[int, bytes | None] = {}  # position in `passed["client"]`
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, _READ)
        self._open = True
        self._listen()
        self._thread = Thread(target=self._run, name=f"l3store-proxy-{self.port}", daemon=True)
        self._thread.start()

    # -- what may be asked of it -----------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        """What clients connect to."""
        return _HOST, self.port

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._links)

    def refuse(self) -> None:
        """Closes all connections and refuses new ones, as a host does whose server has ended."""
        self._do(self._refuse)

    def freeze(self) -> None:
        """Accepts connections and passes nothing, in no direction; what is open stays open."""
        self._do(self._freeze)

    def slow(self, bytes_per_s: float) -> None:
        """Passes no more than that in each direction, over all connections together."""
        self._do(lambda: self._slow(bytes_per_s))

    def cut(self) -> None:
        """Closes all connections now; new ones are served."""
        self._do(self._close_links)

    def cut_after(self, count: int, *, towards: Side = "client", each: bool = False) -> None:
        """Closes a connection, on both sides, when so many more bytes have gone `towards` a side.

        Args:
            count: Bytes; 0 closes it when the first one comes.
            towards: The side that gets the bytes that are counted.
            each: False: counted over all connections, and the one that carries the last of them
                is cut, once. True: each connection is cut after so many of its own, those open
                now and those to come, until `restore`.
        """
        self._do(lambda: self._cut_after(count, towards, each=each))

    def garble(self, at: int, data: bytes | None = None) -> None:
        """Changes what comes `at` bytes later towards the client (over all connections), once.

        Args:
            at: Bytes that pass unchanged before.
            data: What stands there then, in place of as many bytes; None: one byte, inverted.
        """
        self._do(lambda: self._garble(at, data))

    def restore(self) -> None:
        """Is a good network again: ends all of the above. What was cut stays cut."""
        self._do(self._restore)

    def close(self) -> None:
        """Ends it: all connections, its port and its thread. Idempotent."""
        if self._open:
            self._do(self._end)
            self._thread.join()
            self._wake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _do(self, call: Callable[[], None]) -> None:
        if not self._open:
            raise ValueError("the proxy is closed")
        done: Future[None] = Future()
        self._calls.append((call, done))
        self._wake.send(b"!")
        done.result()

    # -- all from here runs in the thread ---------------------------------------------------

    def _run(self) -> None:
        while self._open:
            self._fill()
            for link in tuple(self._links):
                self._watch(link)
            for key, events in self._selector.select(_NAP if self._rate else None):
                if key.fileobj is self._woken:
                    self._called()
                elif key.data is None:
                    self._accept()
                elif key.data in self._links:
                    self._serve(key.data, key.fileobj, events)

    def _called(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._calls:
            call, done = self._calls.popleft()
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

    def _refuse(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._close_links()

    def _freeze(self) -> None:
        self._frozen = True

    def _slow(self, bytes_per_s: float) -> None:
        self._rate, self._filled_at = bytes_per_s, time.monotonic()
        self._allowance = {"client": 0.0, "server": 0.0}

    def _cut_after(self, count: int, towards: Side, *, each: bool) -> None:
        if not each:
            self._cut[towards] = count
            return
        self._cut_each[towards] = count
        for link in self._links:
            link.left[towards] = count

    def _garble(self, at: int, data: bytes | None) -> None:
        start = self.passed["client"] + at
        if data is None:
            self._garbled[start] = None
        else:
            self._garbled |= {start + i: data[i : i + 1] for i in range(len(data))}

    def _restore(self) -> None:
        self._frozen, self._rate = False, None
        for side in self._cut:
            self._cut[side] = self._cut_each[side] = None
            for link in self._links:
                link.left[side] = None
        self._garbled.clear()
        if self._listener is None:
            self._listen()

    def _end(self) -> None:
        self._open = False
        self._refuse()
        self._holder.close()
        self._selector.close()
        self._woken.close()

    def _bound(self, port: int) -> socket.socket:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._bound_buffers(one)
        one.bind((_HOST, port))
        return one

    def _bound_buffers(self, one: socket.socket) -> None:
        if self._buffer_bytes is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer_bytes)

    def _listen(self) -> None:
        self._listener = self._bound(self.port)
        self._listener.setblocking(False)
        self._listener.listen(128)
        self._selector.register(self._listener, _READ)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # the client has left already
        self.accepted += 1
        tcp = isinstance(self._target, tuple)
        server = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
        self._bound_buffers(server)
        for one in (client, server):
            one.setblocking(False)
            if one.family == socket.AF_INET:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(client, server, dict(self._cut_each))
        failed = server.connect_ex(
            self._target if isinstance(self._target, tuple) else os.fspath(self._target)
        )
        if failed not in (0, errno.EINPROGRESS):
            link.close(reset=True)
            return
        self._links.add(link)

    def _fill(self) -> None:
        """Adds to what may pass by `slow`: at most a tenth of a second's worth at a time."""
        if self._rate is None:
            return
        now = time.monotonic()
        for side, left in self._allowance.items():
            more = left + self._rate * (now - self._filled_at)
            self._allowance[side] = min(more, max(self._rate / 10, 1.0))
        self._filled_at = now

    def _watch(self, link: _Link) -> None:
        for side, one in link.ends.items():
            events = 0
            other: Side = "server" if side == "client" else "client"
            if not self._frozen:
                if link.waiting[side] and (self._rate is None or self._allowance[side] >= 1):
                    events |= _WRITE
                if not link.waiting[other] and not link.ended[side]:
                    events |= _READ
            self._register(one, events, link)

    def _register(self, one: socket.socket, events: int, link: _Link) -> None:
        known = self._selector.get_map().get(one.fileno())
        if known is None:
            if events:
                self._selector.register(one, events, link)
        elif not events:
            self._selector.unregister(one)
        elif known.events != events:
            self._selector.modify(one, events, link)

    def _serve(self, link: _Link, one: object, events: int) -> None:
        side: Side = "client" if one is link.ends["client"] else "server"
        try:
            if events & _READ:
                self._take(link, side)
            if events & _WRITE and link in self._links:
                self._give(link, side)
        except BlockingIOError:
            return
        except OSError:
            self._drop(link, reset=True)

    def _take(self, link: _Link, side: Side) -> None:
        """Reads from a side, for the other one."""
        data = link.ends[side].recv(_CHUNK)
        other: Side = "server" if side == "client" else "client"
        if data:
            link.waiting[other] = memoryview(data)
            return
        link.ended[side] = True
        link.ends[other].shutdown(socket.SHUT_WR)
        if link.ended[other]:
            self._drop(link)

    def _give(self, link: _Link, side: Side) -> None:
        """Writes what waits for a side."""
        limits = [limit for limit in (self._cut[side], link.left[side]) if limit is not None]
        if limits and min(limits) == 0:
            self._cut_off(link, side)
            return
        most = min(limits, default=_CHUNK)
        if self._rate is not None:
            most = min(most, int(self._allowance[side]))
        data = link.waiting[side][:most]
        sent = link.ends[side].send(self._changed(data) if side == "client" else data)
        link.waiting[side] = link.waiting[side][sent:]
        self.passed[side] += sent
        self._allowance[side] -= sent
        for limit in (self._cut, link.left):
            if (left := limit[side]) is not None:
                limit[side] = left - sent
        if limits and min(limits) == sent:
            self._cut_off(link, side)

    def _cut_off(self, link: _Link, side: Side) -> None:
        if self._cut[side] == 0:
            self._cut[side] = None
        self._drop(link)

    def _changed(self, data: memoryview) -> memoryview:
        start = self.passed["client"]
        hit = [at for at in self._garbled if start <= at < start + len(data)]
        if not hit:
            return data
        changed = bytearray(data)
        for at in hit:
            new = self._garbled[at]
            changed[at - start] = changed[at - start] ^ 0xFF if new is None else new[0]
        return memoryview(changed)

    def _close_links(self) -> None:
        for link in tuple(self._links):
            self._drop(link)

    def _drop(self, link: _Link, *, reset: bool = False) -> None:
        self._links.discard(link)
        for one in link.ends.values():
            self._register(one, 0, link)
        link.close(reset=reset)


class _Link:
    """One client's connection, and the one to the server that belongs to it."""

    def __init__(
        self, client: socket.socket, server: socket.socket, left: dict[Side, int | None]
    ) -> None:
        self.ends: dict[Side, socket.socket] = {"client": client, "server": server}
        self.waiting: dict[Side, memoryview] = {
            "client": memoryview(b""),
            "server": memoryview(b""),
        }
        self.ended: dict[Side, bool] = {"client": False, "server": False}
        self.left = left

    def close(self, *, reset: bool) -> None:
        for one in self.ends.values():
            if reset and one.family == socket.AF_INET:
                with suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            one.close()
