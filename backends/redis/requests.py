"""Requests as they go over the wire (RESP2), many at a time and without a loop where that can be.

Source of the format: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ASKING", "each", "listing", "request"]

ASKING = b"*1\r\n$6\r\nASKING\r\n"
"""Lets the next request of this connection have a key that is on its way to that server."""


def request(*words: bytes | str | int) -> bytes:
    """Returns one request."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
    return b"".join(parts)


def each(
    before: Sequence[bytes], names: Sequence[bytes], behind: Sequence[bytes] = ()
) -> list[bytes]:
    """Returns a request for each name, with the same words before and behind it.

    Neither words nor names may hold a zero byte.
    """
    start = b"*%d\r\n" % (len(before) + 1 + len(behind)) + _words(before)
    end = b"\r\n" + _words(behind)
    if len(set(map(len, names))) == 1:  # of one place: four times as fast as a loop
        start += b"$%d\r\n" % len(names[0])
        return (start + (end + b"\0" + start).join(names) + end).split(b"\0")
    return [b"%s$%d\r\n%s%s" % (start, len(name), name, end) for name in names]


def listing(word: bytes, names: Sequence[bytes]) -> bytes:
    """Returns one request of a word and many names; fast where all names have one length."""
    if len(set(map(len, names))) != 1:
        return request(word, *names)
    between = b"\r\n$%d\r\n" % len(names[0])
    start = b"*%d\r\n$%d\r\n%s" % (len(names) + 1, len(word), word)
    return between.join((start, *names)) + b"\r\n"


def _words(words: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%s\r\n" % (len(word), word) for word in words])
