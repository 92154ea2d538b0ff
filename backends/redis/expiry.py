"""How long a page lives that nobody reads: the deeper in its chain, the shorter.

Page number d of a chain lives ``ttl * 4096 / (4096 + d)`` since it was last set or read. So with
maxmemory-policy volatile-ttl the ends of chains go first, and of chains those that were read
longest ago; and a chain never loses a page before those behind it, if they were read together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.backends.redis.requests import request
from l3store.errors import IntegrityError
from l3store.page import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.abc import Segments
    from l3store.backends.redis.store import Store

__all__ = ["Expiry"]

_HALF = 4096  # the depth at which a page lives half as long as the first one


class Expiry:
    """The lives of pages.

    Args:
        seconds: Of the first page; 0: for ever.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def sets(
        self, names: Sequence[bytes], pages: Sequence[Segments], sizes: Sequence[int]
    ) -> list[tuple[bytes, bytes]]:
        """Returns for each page what a SET has before and behind its bytes."""
        count, behind = (5 if self._seconds else 3), b"\r\n"
        start = b"*%d\r\n$3\r\nSET\r\n$" % count
        found = []
        for name, page, size in zip(names, pages, sizes, strict=True):
            if self._seconds:
                life = b"%d" % self._life(page)
                behind = b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(life), life)
            found.append((b"%s%d\r\n%s\r\n$%d\r\n" % (start, len(name), name, size), behind))
        return found

    def refresh(
        self,
        store: Store,
        names: Sequence[bytes],
        pages: Sequence[Segments],
        done: Sequence[bool],
    ) -> list[int]:
        """Begins the lives of the pages anew that are `done`; one round trip, none without ttl.

        Returns:
            Which of them are gone: their lives ended before.
        """
        if not self._seconds:
            return []
        there = [i for i, good in enumerate(done) if good]
        said = store.lines(
            [names[i] for i in there],
            [request("PEXPIRE", names[i], self._life(pages[i])) for i in there],
        )
        return [i for i, line in zip(there, said, strict=True) if line == b":0"]

    def _life(self, page: Segments) -> int:
        """Milliseconds; a page of unknown depth lives as the first one."""
        try:
            depth = parse(page[0]).depth or 0
        except IntegrityError:
            depth = 0
        return max(1, round(self._seconds * 1000 * _HALF / (_HALF + depth)))
