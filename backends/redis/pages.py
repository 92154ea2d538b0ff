r"""Pages over a wire: pipelined GET and SET in a bounded window, with no copy of a page.

A page that is there is answered by ``$<length>\r\n``, its bytes, and ``\r\n``. As the length is
known, one system call reads a page's bytes into the caller's memory, and behind them the line end
and the head of the next reply: nothing is ever read into the memory of a page before the head of
its reply was seen. The line end is waited for, the head of the next reply is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from l3store.backends.redis.refusals import Refused
from l3store.backends.redis.wire import OutOfStep, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from l3store.abc import Segments
    from l3store.backends.redis.wire import Wire

__all__ = ["Odd", "read_pages", "write_pages"]

_END = b"\r\n"
_AT_ONCE = 1 << 20  # bytes of pages that one system call is given to send
_UNANSWERED = 128  # pages; their replies fit into any socket's buffer, so that nobody blocks
_START = 128  # bytes that are kept of a value that is no page of the right length
_DRAINED = 64 << 10  # bytes at a time


class Odd(NamedTuple):
    """What is stored has another length than the page's memory; it was read past."""

    length: int
    start: bytes
    """Its first bytes, at most 128: a header, if it has one."""


def read_pages(
    wire: Wire,
    window: int,
    requests: Sequence[bytes],
    pages: Sequence[Segments],
    sizes: Sequence[int],
) -> Iterator[bool | Odd | Refused]:
    """Reads pages into their segments; yields for each, in order, what came.

    True: all bytes, and the end of the reply. False: absent. While the caller looks at one page,
    the server sends the next ones. If he does not go on to the end, the connection must be closed.

    Args:
        wire: The connection.
        window: Bytes that may be asked for and not read yet; a page at least.
        requests: A GET for each page.
        pages: Where to.
        sizes: Bytes of each.
    """
    count = len(requests)
    heads = {size: b"$%d\r\n" % size for size in set(sizes)}
    tails = {tail: bytearray(tail) for tail in (_END, *(_END + head for head in heads.values()))}
    views = {tail: memoryview(room) for tail, room in tails.items()}
    begun = False  # the head of this reply came behind the last one, and is that of a page
    asked = owed = 0
    for i, size in enumerate(sizes):
        if asked < count and (asked == i or owed <= window // 2):
            first = asked
            while asked < count and (asked == i or owed + sizes[asked] <= window):
                owed += sizes[asked] + len(requests[asked])
                asked += 1
            wire.send([b"".join(requests[first:asked])])
        owed -= size + len(requests[i])
        if not begun:
            head = heads[size]
            line = wire.line(len(head))
            if line != head[:-2]:
                yield _read_other(wire, line)
                continue
        # What should come behind the page: its end, and the head of the next one.
        tail = _END + heads[sizes[i + 1]] if i + 1 < asked else _END
        got = wire.receive(pages[i], size, views[tail])
        begun = got == len(tail) > 2 and tails[tail] == tail
        if not begun:
            if tails[tail][:2] != _END:
                raise OutOfStep("a page does not end where it should")
            if got > 2:
                wire.ahead = bytes(tails[tail][2:got])
        yield True


def _read_other(wire: Wire, line: bytes) -> bool | Odd | Refused:
    """Reads a reply that is not the page: nothing, an error, or another length."""
    if line == b"$-1":
        return False
    if line[:1] == b"-":
        return Refused.by(line)
    length = number(line)
    if line[:1] != b"$" or length < 0:
        raise OutOfStep(f"{line[:40]!r} does not answer a GET")
    start = bytearray(min(length, _START))
    wire.fill([memoryview(start)])
    left, scratch = length - len(start), memoryview(bytearray(_DRAINED))
    while left:
        part = scratch[: min(left, _DRAINED)]
        wire.fill([part])
        left -= len(part)
    wire.fill([scratch[:2]])
    if scratch[:2] != _END:
        raise OutOfStep("a value does not end where it should")
    return Odd(length, bytes(start))


def write_pages(
    wire: Wire,
    window: int,
    requests: Sequence[tuple[bytes, bytes]],
    pages: Sequence[Segments],
    sizes: Sequence[int],
) -> Iterator[Refused | None]:
    """Sends pages from their segments; yields for each, in order, None (stored) or why not.

    Replies are read while the window is full, so neither side ever waits for the other to read.
    If the caller does not go on to the end, the connection must be closed.

    Args:
        wire: The connection.
        window: Bytes that may be sent and not answered yet; a page at least.
        requests: What stands before and what stands behind each page (a SET's words).
        pages: From where; may be read-only.
        sizes: Bytes of each.
    """
    count = len(requests)
    sent = answered = owed = 0
    while answered < count:
        pieces: list[bytes | memoryview] = []
        group = 0
        while (
            sent < count
            and sent - answered < _UNANSWERED
            and (sent == answered or owed + sizes[sent] <= window)
            and group < _AT_ONCE
        ):
            before, after = requests[sent]
            pieces += (before, *pages[sent], after)
            owed += sizes[sent]
            group += sizes[sent]
            sent += 1
        if pieces:
            wire.send(pieces)
            continue
        for line in wire.some_lines(sent - answered):
            owed -= sizes[answered]
            answered += 1
            if line == b"+OK":
                yield None
            elif line[:1] == b"-":
                yield Refused.by(line)
            else:
                raise OutOfStep(f"{line[:40]!r} does not answer a SET")
