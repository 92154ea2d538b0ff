"""Batches of pages between the caller's memory and the servers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from l3store.backends.redis.expiry import Expiry
from l3store.backends.redis.lookup import stored
from l3store.backends.redis.opening import MARKER
from l3store.backends.redis.pages import Odd, read_pages, write_pages
from l3store.backends.redis.refusals import FAULTS, Refused, typed
from l3store.backends.redis.requests import each, request
from l3store.errors import CapacityError
from l3store.page import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from l3store.abc import Check, Segments
    from l3store.backends._lengths import Lengths
    from l3store.backends.redis.names import Names
    from l3store.backends.redis.opening import Limits
    from l3store.backends.redis.options import RedisOptions
    from l3store.backends.redis.store import Refusals, Store, Work
    from l3store.backends.redis.wire import Wire

__all__ = ["Transfer"]

_log = logging.getLogger(__name__)

# Removes a value only if it is the one that was seen: of that length, with that start. What is no
# string is no page of anybody and goes, too.
_REMOVE = (
    b"local t = redis.call('TYPE', KEYS[1]).ok "
    b"if t == 'string' and (redis.call('GETRANGE', KEYS[1], 0, 127) ~= ARGV[1] "
    b"or (ARGV[2] ~= '' and redis.call('STRLEN', KEYS[1]) ~= tonumber(ARGV[2]))) "
    b"then return 0 end return redis.call('UNLINK', KEYS[1])"
)


class Transfer:
    """Moves pages. Thread-safe; blocks; raises bare faults, with what is done in typed errors."""

    def __init__(
        self,
        store: Store,
        names: Names,
        lengths: Lengths,
        options: RedisOptions,
        limits: Limits,
    ) -> None:
        self._store, self._names, self._lengths = store, names, lengths
        self._window, self._evicts = int(options.window), limits.evicts
        self._writable = options.mode == "rw"
        self._expiry = Expiry(options.ttl)

    def read(
        self,
        keys: Sequence[str],
        into: Sequence[Segments],
        lengths: Mapping[str, int],
        check: Check | None,
    ) -> list[bool]:
        """Reads pages; what is damaged is removed."""
        sizes = _sizes(keys, lengths)
        names = self._names.pages(keys)
        requests = each((b"GET",), names)
        done = [False] * len(keys)
        damaged: dict[int, Odd] = {}

        def work(wire: Wire, part: Sequence[int]) -> Refusals:
            refused = []
            batch = _picked(part, requests, into, sizes)
            for i, reply in zip(part, read_pages(wire, self._window, *batch), strict=True):
                if reply is True:
                    if check is None or check(i, into[i]):
                        done[i] = True
                    else:
                        damaged[i] = Odd(sizes[i], bytes(into[i][0]))
                elif isinstance(reply, Odd):
                    damaged[i] = reply
                elif isinstance(reply, Refused):
                    refused.append((i, reply))
            return refused

        refused = self._spread(names, work, done)
        for i, error in refused.items():
            if error.code != "WRONGTYPE":
                raise typed(error, self._store.servers.name, done)
            damaged[i] = Odd(0, b"")
        self._heal(keys, names, sizes, damaged)
        if self._writable:
            try:
                self._expiry.refresh(self._store, names, into, done)
            except FAULTS as error:
                raise typed(error, self._store.servers.name, done) from error
        return done

    def write(
        self, keys: Sequence[str], pages: Sequence[Segments], lengths: Mapping[str, int]
    ) -> list[bool]:
        """Stores pages, but those that are there already in their full length.

        Raises:
            CapacityError: None is stored, as the server is full.
        """
        done = [False] * len(keys)
        names, sizes = self._names.pages(keys), _sizes(keys, lengths)
        try:
            self._lengths.check_all(lengths, claim=True)
        except Refused as error:
            if error.code != "OOM":
                raise
        else:
            self._find(names, pages, sizes, lengths, done)
            found = [i for i, good in enumerate(done) if good]
            self._send([i for i, good in enumerate(done) if not good], names, pages, sizes, done)
            if self._evicts and any(done):
                self._confirm(names, done)
                lost = [i for i in found if not done[i]]  # pushed out by others of the batch
                if lost:
                    self._send(lost, names, pages, sizes, done)
                    self._confirm(names, done)
        if keys and not any(done):
            raise CapacityError(f"{self._store.servers.name}: no memory left for pages", done=done)
        return done

    def remove(self, names: Sequence[bytes], headers: Sequence[bytes | None]) -> list[bool]:
        """Removes pages, those with a header only if theirs is the same."""
        requests = [
            request("UNLINK", name)
            if header is None
            else request("EVAL", _REMOVE, 1, name, header, b"")
            for name, header in zip(names, headers, strict=True)
        ]
        return [count > 0 for count in self._store.numbers(names, requests)]

    # -- writing -----------------------------------------------------------------------------

    def _find(
        self,
        names: Sequence[bytes],
        pages: Sequence[Segments],
        sizes: Sequence[int],
        lengths: Mapping[str, int],
        done: list[bool],
    ) -> None:
        """Marks what is stored already: any whole page of a key is as good as another.

        Marker and lengths are made again by the way: the server may have lost them since, as they
        are what it evicts first where nobody asks for them.
        """
        at = self._names.lengths
        again = [request("HSETNX", at, place, length) for place, length in lengths.items()]
        again.append(request("SET", self._names.marker, MARKER, "NX"))
        asked = [*names, *[at] * len(lengths), self._names.marker]
        found = self._store.lines(asked, [*each((b"STRLEN",), names), *again])
        whole = {size: b":%d" % size for size in set(sizes)}
        for i, size in enumerate(sizes):
            done[i] = found[i] == whole[size]
        for i in self._expiry.refresh(self._store, names, pages, done):
            done[i] = False

    def _send(
        self,
        which: Sequence[int],
        names: Sequence[bytes],
        pages: Sequence[Segments],
        sizes: Sequence[int],
        done: list[bool],
    ) -> None:
        """Stores those pages `which`, and marks them."""
        names, pages, sizes = _picked(which, names, pages, sizes)
        requests = self._expiry.sets(names, pages, sizes)

        def work(wire: Wire, part: Sequence[int]) -> Refusals:
            refused = []
            batch = _picked(part, requests, pages, sizes)
            for n, error in zip(part, write_pages(wire, self._window, *batch), strict=True):
                if error is None:
                    done[which[n]] = True
                else:
                    refused.append((n, error))
            return refused

        for error in self._spread(names, work, done).values():
            if error.code != "OOM":
                raise typed(error, self._store.servers.name, done)

    def _confirm(self, names: Sequence[bytes], done: list[bool]) -> None:
        """Unmarks what the batch itself has pushed out again."""
        marked = [i for i, good in enumerate(done) if good]
        for i, there in zip(marked, stored(self._store, [names[i] for i in marked]), strict=True):
            done[i] = there

    # -- reading -----------------------------------------------------------------------------

    def _heal(
        self,
        keys: Sequence[str],
        names: Sequence[bytes],
        sizes: Sequence[int],
        damaged: Mapping[int, Odd],
    ) -> None:
        """Removes damaged pages, if they still are what was read."""
        places = {
            keys[i].rpartition("/")[0]: sizes[i] - HEADER_BYTES
            for i, found in damaged.items()
            if found.length != sizes[i]
        }
        for place, length in places.items():
            self._lengths.recheck(place, length)
        # The server may have evicted a place's length: then who is wrong is not known, and what is
        # stored stays until somebody stores it anew.
        unknown = {place for place in places if self._lengths.known(place) is None}
        damaged = {
            i: found
            for i, found in damaged.items()
            if found.length == sizes[i] or keys[i].rpartition("/")[0] not in unknown
        }
        if not damaged or not self._writable:
            return
        try:
            self._store.numbers(
                [names[i] for i in damaged],
                [
                    request("EVAL", _REMOVE, 1, names[i], found.start, found.length)
                    for i, found in damaged.items()
                ],
            )
        except FAULTS as error:
            # Not the reader's trouble: they stay refused, and the next reader tries again.
            _log.warning("damaged pages could not be removed: %s", error)

    # -- both --------------------------------------------------------------------------------

    def _spread(
        self,
        names: Sequence[bytes],
        work: Work,
        done: Sequence[bool],
    ) -> dict[int, Refused]:
        try:
            return self._store.spread(names, work, heavy=True)
        except FAULTS as error:
            raise typed(error, self._store.servers.name, done) from error


def _sizes(keys: Sequence[str], lengths: Mapping[str, int]) -> list[int]:
    """The bytes of each page, header included."""
    if len(lengths) == 1:
        return [HEADER_BYTES + length for length in lengths.values()] * len(keys)
    return [HEADER_BYTES + lengths[key.rpartition("/")[0]] for key in keys]


def _picked(which: Sequence[int], *lists: Sequence[Any]) -> Any:
    """The same positions of several lists."""
    return [[items[i] for i in which] for items in lists]
