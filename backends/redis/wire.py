"""A connection's socket while one call has it: requests out, replies in.

redis-py has opened the socket, and spoken TLS and AUTH on it; from then on only this module reads
and writes it, so that each byte is read once and straight to where it belongs. After any error but
a `Refused` the stream may be out of step: the connection must be closed.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from typing import TYPE_CHECKING

from l3store.abc import time_left
from l3store.backends._vectors import IOV_MAX, behind
from l3store.backends.redis.refusals import Refused
from l3store.backends.redis.requests import request

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OutOfStep", "Wire", "number", "whole"]

_TIMEVAL = struct.Struct("@ll")  # struct timeval
_BITE = 512  # bytes read where it is not known how many will come
_LONGEST_LINE = 64 << 10
_LONGEST_BULK = 512 << 20  # of what is no page
_DEEPEST = 8  # arrays in arrays
_ONE_LINE = frozenset((b":", b"+", b"-"))  # how replies of one line begin
_SMALL = 16 << 10  # pieces below go into one TLS record


class OutOfStep(ConnectionError):
    """The server's words are no reply to what was asked, or it ended the connection."""


class Wire:
    """Not thread-safe: it belongs to one call.

    Args:
        sock: Connected, nothing owed on it.
        timeout: Seconds, the longest wait for a byte; the deadline of the thread's call may
            shorten it (`l3store.abc.time_left`).
    """

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock, self._timeout = sock, timeout
        self._plain = not isinstance(sock, ssl.SSLSocket)
        left = time_left()
        self._until = None if left is None else time.monotonic() + left
        self.ahead = b""
        """What came behind the last reply that was read."""
        self.spent = False
        """Set where the connection leads to the wrong server: it is closed after the call."""
        self._wait = 0.0  # the socket's time-out now
        if self._plain:
            sock.settimeout(None)  # the kernel waits, with a time-out of its own
        self._be_patient()

    def in_step(self) -> bool:
        """Returns whether the next call may use the socket; else it must be closed."""
        return not (self.ahead or self.spent)

    # -- small requests ----------------------------------------------------------------------

    def ask(self, *words: bytes | str | int) -> object:
        """Sends one request and returns its reply: int, bytes, None, or a list of these.

        Raises:
            Refused: The server says no.
        """
        self.send([request(*words)])
        reply = self.reply()
        if isinstance(reply, Refused):
            raise reply
        return reply

    def reply(self, depth: int = 0) -> object:
        """Returns the next reply, an error as a `Refused`. `depth`: arrays that it stands in."""
        line = self.line()
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return number(line, b":")
        if kind == b"+":
            return rest
        if kind == b"-":
            return Refused.by(line)
        count = number(line)
        if count < 0:
            return None
        if count > _LONGEST_BULK or depth > _DEEPEST:
            raise OutOfStep(f"{line[:40]!r} is no reply")
        if kind == b"*":
            return [self.reply(depth + 1) for _ in range(count)]
        data = bytearray(count + 2)
        self.fill([memoryview(data)])
        if data[-2:] != b"\r\n":
            raise OutOfStep("a value does not end where it should")
        return bytes(data[:-2])

    def lines(self, requests: bytes, count: int) -> list[bytes]:
        """Sends `count` requests whose replies are one line each, and returns these lines.

        At most 1,024 requests: all are sent before a reply is read.
        """
        self.send([requests])
        found: list[bytes] = []
        while len(found) < count:
            found += self.some_lines(count - len(found))
        for line in found:
            if line[:1] not in _ONE_LINE and line != b"$-1":
                raise OutOfStep(f"{line[:40]!r} is no reply of one line")
        return found

    def some_lines(self, most: int) -> list[bytes]:
        """Returns the replies that are there, each of one line: at least one, at most `most`."""
        while b"\r\n" not in self.ahead:
            self._longer(max(most * 4, _BITE))
        *lines, self.ahead = self.ahead.split(b"\r\n", most)
        return lines

    # -- sending -----------------------------------------------------------------------------

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Sends all pieces, without joining those that are large."""
        if not self._plain:
            self._send_secret(pieces)
            return
        for at in range(0, len(pieces), IOV_MAX):
            left: Sequence[bytes | memoryview] = pieces[at : at + IOV_MAX]
            wanted = sum(map(len, left))
            while wanted:
                self._be_patient()
                sent = self._sock.sendmsg(left)
                wanted -= sent
                if wanted:
                    left = behind([memoryview(piece) for piece in left], sent)

    def _send_secret(self, pieces: Sequence[bytes | memoryview]) -> None:
        small: list[bytes | memoryview] = []
        for piece in pieces:
            if len(piece) <= _SMALL:
                small.append(piece)
                continue
            if small:
                self._send_all(b"".join(small))
                small.clear()
            self._send_all(piece)
        if small:
            self._send_all(b"".join(small))

    def _send_all(self, piece: bytes | memoryview) -> None:
        view = memoryview(piece)
        while view.nbytes:
            self._be_patient()
            view = view[self._sock.send(view[: 1 << 20]) :]

    # -- receiving ---------------------------------------------------------------------------

    def receive(self, pieces: Sequence[memoryview], wanted: int, tail: memoryview) -> int:
        """Reads into `pieces`, which it fills, and into `tail` what comes behind.

        Args:
            pieces: Their bytes, and two more, must be on their way: it is waited for them.
            wanted: How many bytes the pieces have.
            tail: Two bytes at least. What it has beyond is read only if it is there at once, as it
                may never come.

        Returns:
            How many bytes of `tail` were read, at least two.
        """
        if self.ahead:
            self.fill([*pieces, tail[:2]])
            return 2
        got = self._receive_into([*pieces, tail]) if len(pieces) < IOV_MAX else 0
        if got < wanted + 2:
            self._fill(behind([*pieces, tail[:2]], got))
            return 2
        return got - wanted

    def fill(self, pieces: list[memoryview]) -> None:
        """Reads as many bytes as the pieces have; these must be on their way."""
        self._fill(behind(pieces, self._place_ahead(pieces)))

    def _fill(self, pieces: list[memoryview]) -> None:
        if not self._plain:  # one piece a call, so many pieces need no list of what is left
            for piece in pieces:
                left = piece
                while left.nbytes:
                    left = left[self._receive_into([left]) :]
            return
        while pieces:
            pieces = behind(pieces, self._receive_into(pieces[:IOV_MAX], socket.MSG_WAITALL))

    def _place_ahead(self, pieces: Sequence[memoryview]) -> int:
        got = 0
        for piece in pieces:
            part = self.ahead[got : got + len(piece)]
            piece[: len(part)] = part
            got += len(part)
            if got == len(self.ahead):
                break
        self.ahead = self.ahead[got:]
        return got

    def _receive_into(self, pieces: list[memoryview], flags: int = 0) -> int:
        self._be_patient()
        if self._plain:
            got = self._sock.recvmsg_into(pieces, 0, flags)[0]
        else:
            got = self._sock.recv_into(pieces[0])
        if not got:
            raise OutOfStep("the server closed the connection")
        return got

    def _receive_some(self, most: int) -> bytes:
        """Returns what is there, at least a byte."""
        self._be_patient()
        got = self._sock.recv(most)
        if not got:
            raise OutOfStep("the server closed the connection")
        return got

    def line(self, bite: int = _BITE) -> bytes:
        """Returns the next line without its end; reads at most `bite` bytes at a time for it."""
        while (end := self.ahead.find(b"\r\n")) < 0:
            self._longer(bite)
        line, self.ahead = self.ahead[:end], self.ahead[end + 2 :]
        return line

    def _longer(self, bite: int) -> None:
        """Reads more of a line that has not ended."""
        if len(self.ahead) > _LONGEST_LINE:
            raise OutOfStep(f"{self.ahead[:40]!r}... is no reply")
        self.ahead += self._receive_some(bite)

    # -- waiting -----------------------------------------------------------------------------

    def _be_patient(self) -> None:
        """Bounds the next wait. Cheap as long as the deadline is far."""
        wait = self._timeout
        if self._until is not None:
            wait = min(wait, self._until - time.monotonic())
            if wait <= 0:
                raise TimeoutError("the deadline has passed")
        if wait == self._wait:
            return
        self._wait = wait
        if self._plain:
            whole = int(wait)
            value = _TIMEVAL.pack(whole, max(int((wait - whole) * 1e6), 0 if whole else 1))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._sock.setsockopt(socket.SOL_SOCKET, option, value)
        else:
            self._sock.settimeout(wait)


def number(line: bytes, kinds: bytes = b"$*") -> int:
    """Returns the number in a line that begins with one of `kinds`: a head's, unless said.

    Raises:
        OutOfStep: It is no such line.
    """
    try:
        if line[:1] not in kinds:
            raise ValueError
        return int(line[1:])
    except ValueError:
        raise OutOfStep(f"{line[:40]!r} is no reply") from None


def whole(text: str) -> int:
    """Returns the number that a server has written out.

    Raises:
        OutOfStep: It is none.
    """
    try:
        return int(text)
    except ValueError:
        raise OutOfStep(f"{text[:40]!r} is no number") from None
