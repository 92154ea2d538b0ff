"""Frames on a stream: how `tcp` cuts it, and a socket that is written without waiting.

A frame is a header of 28 bytes, magic ``L3CT``, version u16, kind u8, one zero byte, payload length
u32, cookie 16, little endian, and its payload. Nothing is unpickled, and no more is kept of a
stream than one frame of the length that its reader allows.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from secrets import compare_digest
from struct import Struct
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from socket import socket

__all__ = ["COOKIE_BYTES", "LIMIT", "Channel", "Frame", "Inbox", "pack_frame"]

VERSION = 1
COOKIE_BYTES = 16
LIMIT = 16 << 20
"""Bytes of the longest payload."""
_MAGIC = b"L3CT"
_HEAD = Struct(f"<4sHBxL{COOKIE_BYTES}s")
_READ = 1 << 16


class Frame(IntEnum):
    """What a frame is."""

    HELLO = 1
    """Follower: its rank, the number of ranks, which of the two sockets this is, and who it is."""
    WELCOME = 2
    """Leader: the socket has its seat."""
    BEAT = 3
    REPORT = 4
    BLOB = 5
    """Follower: its part of an all-gather."""
    SHARED = 6
    """Leader: one rank's part; they come by rank."""
    RECORD = 7
    NOTICE = 8
    """The group has ended: why, and which rank it is about."""
    BYE = 9
    """The end of this socket, which comes next, is meant."""


def pack_frame(kind: Frame, cookie: bytes, payload: bytes = b"") -> bytes:
    """Returns the bytes of a frame; the payload has at most `LIMIT` bytes."""
    return _HEAD.pack(_MAGIC, VERSION, kind, len(payload), cookie) + payload


class Inbox:
    """Cuts a stream into frames. Not thread-safe.

    Attributes:
        limit: Longest payload that is taken.
        dropped: Frames with another cookie or version, which were passed over.
    """

    def __init__(self, cookie: bytes, limit: int) -> None:
        self.limit = limit
        self.dropped = 0
        self._cookie = cookie
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds what came."""
        self._data += data

    def take(self) -> Iterator[tuple[int, bytes]]:
        """Gives (kind, payload) of each frame that is here as a whole.

        Raises:
            ValueError: This is no stream of frames, or one is longer than the limit.
        """
        data, at, end = self._data, 0, len(self._data)
        try:
            while end - at >= _HEAD.size:
                magic, version, kind, length, cookie = _HEAD.unpack_from(data, at)
                if magic != _MAGIC:
                    raise ValueError("it sends what is no frame")
                if length > self.limit:
                    raise ValueError(f"it sends a frame of {length} bytes; {self.limit} is most")
                start = at + _HEAD.size
                if end - start < length:
                    return
                at = start + length
                if version == VERSION and compare_digest(cookie, self._cookie):
                    yield kind, bytes(data[start:at])
                else:
                    self.dropped += 1
        finally:
            if at:
                del data[:at]


class Channel:
    """One connected, non-blocking socket. `send` and `latest` may be called by any thread.

    What the kernel does not take at once waits here for `flush`. An error of the socket is an end:
    `broken` is set, and what is sent later goes nowhere.

    Attributes:
        inbox: What was received; read by one thread.
        waiting: Bytes that wait for `flush`.
        broken: The socket can no longer be written.
    """

    def __init__(self, sock: socket, inbox: Inbox, wake: Callable[[], None]) -> None:
        sock.setblocking(False)
        self.inbox = inbox
        self.waiting = 0
        self.broken = False
        self._sock = sock
        self._wake = wake  # the thread that will flush
        self._lock = Lock()
        self._queue: deque[memoryview] = deque()
        self._latest: bytes | None = None

    def fileno(self) -> int:
        """Returns the descriptor, -1 when it is closed."""
        return self._sock.fileno()

    def send(self, data: bytes) -> int:
        """Sends a frame behind all earlier ones; does not wait. Returns the bytes that wait."""
        with self._lock:
            at_once = not self._queue and not self.broken
            sent = self._send(data) if at_once else 0
            if sent == len(data):
                return 0
            self._queue.append(memoryview(data)[sent:])
            self.waiting += len(data) - sent
            if self.broken:
                self._end()
            waiting = self.waiting
        if waiting or self.broken:
            self._wake()
        return waiting

    def latest(self, data: bytes) -> None:
        """Sends a frame, or has it wait in the place of the one that waits."""
        with self._lock:
            if self._queue:
                self._latest = data
                return
        self.send(data)

    def flush(self) -> None:
        """Sends what the kernel takes of what waits."""
        with self._lock:
            self._flush()
            if not self._queue and self._latest is not None:
                self._queue.append(memoryview(self._latest))
                self.waiting, self._latest = len(self._latest), None
                self._flush()

    def read(self) -> int:
        """Feeds the inbox with what is here. Returns its bytes, or -1 at the end of the stream."""
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            return 0
        except OSError:
            return -1
        self.inbox.feed(data)
        return len(data) or -1

    def shut(self, how: int) -> None:
        """Ends a direction, or both; whoever waits for the socket wakes up."""
        try:
            self._sock.shutdown(how)
        except OSError:
            self.broken = True  # the peer was faster

    def close(self) -> None:
        """Closes the socket; idempotent."""
        with self._lock:
            self._end()
            self._sock.close()

    def _flush(self) -> None:
        while self._queue and not self.broken:
            first = self._queue[0]
            sent = self._send(first)
            self.waiting -= sent
            if sent < len(first):
                self._queue[0] = first[sent:]
                break
            self._queue.popleft()
        if self.broken:
            self._end()

    def _send(self, data: bytes | memoryview) -> int:
        """Returns what the kernel has taken."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.broken = True
            return 0

    def _end(self) -> None:
        self.broken = True
        self.waiting, self._latest = 0, None
        self._queue.clear()
