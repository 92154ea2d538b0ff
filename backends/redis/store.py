"""Batches of requests over the servers of a store: each to its server, all at once."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from l3store.abc import call_deadline, time_left
from l3store.backends.redis.refusals import Refused
from l3store.backends.redis.requests import ASKING
from l3store.backends.redis.wire import number
from l3store.calls import Workers, together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.backends.redis.links import Link
    from l3store.backends.redis.servers import Servers
    from l3store.backends.redis.wire import Wire

    Refusals = list[tuple[int, Refused]]
    Work = Callable[[Wire, Sequence[int]], Refusals]

__all__ = ["Store"]

_LINES = 1024  # requests that are sent before their replies are read
_THREADS = 32
_ROUNDS = 2  # a key that another server has is asked for there, once


class Store:
    """What all calls do with the servers. Thread-safe; blocks; raises what the wire raises.

    Args:
        servers: Who has what.
        connections: That one call uses at once, for each server.
    """

    def __init__(self, servers: Servers, connections: int) -> None:
        self.servers, self._connections = servers, connections
        self._workers = Workers(_THREADS, "l3store-redis")

    def close(self) -> None:
        """Ends threads and connections; no call may be running."""
        self._workers.stop()
        self.servers.close()

    # -- small requests ----------------------------------------------------------------------

    def ask(self, name: bytes, *requests: bytes) -> list[object]:
        """Sends requests about one name; returns their replies.

        Raises:
            Refused: The server says no to one of them.
        """
        found = self.replies([name] * len(requests), requests)
        for reply in found:
            if isinstance(reply, Refused):
                raise reply
        return found

    def replies(self, names: Sequence[bytes], requests: Sequence[bytes]) -> list[object]:
        """Sends a request about each name; returns the replies, errors as `Refused`."""
        found: list[object] = [None] * len(names)

        def work(wire: Wire, part: Sequence[int]) -> Refusals:
            refused = []
            for at in range(0, len(part), _LINES):
                chunk = part[at : at + _LINES]
                wire.send([b"".join([requests[i] for i in chunk])])
                for i in chunk:
                    found[i] = reply = wire.reply()
                    if isinstance(reply, Refused):
                        refused.append((i, reply))
            return refused

        self.spread(names, work)
        return found

    def lines(self, names: Sequence[bytes], requests: Sequence[bytes]) -> list[bytes]:
        """Sends a request about each name whose reply is one line; returns these lines."""
        found = [b""] * len(names)

        def work(wire: Wire, part: Sequence[int]) -> Refusals:
            for at in range(0, len(part), _LINES):
                chunk = part[at : at + _LINES]
                joined = b"".join([requests[i] for i in chunk])
                for i, line in zip(chunk, wire.lines(joined, len(chunk)), strict=True):
                    found[i] = line
            return [(i, Refused.by(found[i])) for i in part if found[i][:1] == b"-"]

        self.spread(names, work)
        return found

    def numbers(self, names: Sequence[bytes], requests: Sequence[bytes]) -> list[int]:
        """Sends a request about each name whose reply is a number; returns these.

        Raises:
            Refused: The server says no to one of them.
        """
        found = self.lines(names, requests)
        for line in found:
            if line[:1] == b"-":
                raise Refused.by(line)
        return [number(line, b":") for line in found]

    # -- all servers at once -----------------------------------------------------------------

    def spread(
        self, names: Sequence[bytes], work: Work, *, heavy: bool = False
    ) -> dict[int, Refused]:
        """Runs `work` on a connection for the names of each server, at the same time.

        What was refused because another server has it is tried there, once. Returns when all work
        has returned, whatever happens.

        Args:
            names: What the requests are about.
            work: Gets a connection and the positions of its names; returns which were refused.
            heavy: It is about pages, worth several connections to one server.

        Returns:
            What was refused, by position.
        """
        refused: dict[int, Refused] = {}
        which: Sequence[int] = range(len(names))
        for round_ in range(_ROUNDS):
            parts = self._parts(names, which, refused, self._connections if heavy else 1)
            refused |= self._together([partial(self._run, *part, work) for part in parts])
            which = [i for i in which if i in refused and refused[i].elsewhere]
            if not which or round_ + 1 == _ROUNDS:
                break
            self.servers.refresh()
        return refused

    def _parts(
        self,
        names: Sequence[bytes],
        which: Sequence[int],
        refused: dict[int, Refused],
        connections: int,
    ) -> list[tuple[Link, bool, Sequence[int]]]:
        """Who is asked for what, and whether that is on its way there."""
        asked = {i: refused.pop(i).asks for i in which if i in refused}
        on_their_way = {i: address for i, address in asked.items() if address is not None}
        parts: list[tuple[Link, bool, Sequence[int]]] = [
            (self.servers.at(address), True, (i,)) for i, address in on_their_way.items()
        ]
        at_home = [i for i in which if i not in on_their_way] if on_their_way else which
        for link, part in self.servers.split(names, at_home):
            parts += [(link, False, cut) for cut in _cut(part, connections)]
        return parts

    def _run(self, link: Link, asking: bool, part: Sequence[int], work: Work) -> Refusals:
        with link.lend() as wire:
            if asking:
                wire.lines(ASKING, 1)
            refused = work(wire, part)
            wire.spent = any(error.code == "READONLY" for _, error in refused)
            return refused

    def _together(self, tasks: Sequence[Callable[[], Refusals]]) -> dict[int, Refused]:
        """Runs all tasks, the first one in this thread, and waits for all of them."""
        left = time_left()
        until = None if left is None else time.monotonic() + left

        def bounded(task: Callable[[], Refusals]) -> Refusals:
            if until is None:
                return task()
            with call_deadline(until - time.monotonic()):  # it may have waited for a thread
                return task()

        # The first one runs in this thread, which has the deadline.
        all_of_them: list[Callable[[], Refusals]] = [*tasks[:1]]
        all_of_them += [partial(bounded, task) for task in tasks[1:]]
        found, errors = together(self._workers, all_of_them)
        if errors:
            self.servers.suspect()
            raise errors[0]
        return {i: error for each in found for i, error in each}


def _cut(part: Sequence[int], count: int) -> list[Sequence[int]]:
    """Cuts into at most `count` runs of neighbours."""
    step = -(-len(part) // count) or 1
    return [part[at : at + step] for at in range(0, len(part), step)]
