"""The figures: rounds in which all sides move the same pages, one after the other."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from figures import Figure, Pairs, at_most
from pages import KIB, Memory, Shape, size_name
from rounds import Side, rounds, speeds, times_of
from servers import asked, clear, seaweedfs, stub
from sides import Boto3, LMCache, Obstore, Ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers import Where

__all__ = ["SIZES", "Setting", "ceiling", "exists", "peers", "real", "transfers"]

SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
_BATCHES = (32, 128)
_MOST = 256 << 20  # bytes of a batch: a side's batches lie in memory twice
_SMALL_PAGE = 4 * KIB  # of lookups, which no page's size touches
_OF_OBSTORE, _OF_BOTO3 = 0.85, 2.5
_LOOKUPS, _FIRST_LOOKUPS = 20, 8  # a round


@dataclass(frozen=True)
class Setting:
    """What one run is told on its command line."""

    folder: str
    lmcache: str
    rounds: int
    least: int
    """Bytes that a side moves at least in a round; fewer are too short to time."""


def ceiling(setting: Setting) -> Iterator[Figure]:
    """What the stub itself gives to one plain socket."""
    for size in SIZES:
        with stub(setting.folder) as where, closing(_Socket(where)) as plain:
            plain.put(bytes(size))
            count = max(8, setting.least // size)
            begin = time.perf_counter()
            for _ in range(count):
                plain.get(size)
            took = time.perf_counter() - begin
        yield Figure(f"stub, one socket, get {size_name(size)}", "GB/s", count * size / took / 1e9,
                     note="recv_into one buffer, no threads")  # fmt: skip


def transfers(setting: Setting, size: int) -> Iterator[Figure]:
    """Sets and gets on the stub, beside obstore and boto3 in as many threads."""
    for batch in _BATCHES:
        shape = Shape(size, batch)
        if shape.batch_bytes > _MOST:
            continue
        with stub(setting.folder) as where, ExitStack() as stack:
            pages = Memory(shape)
            ours, bare = Ours("ours", pages, where), Ours("ours, bare", pages, where, bare=True)
            other, plain = Obstore("obstore", pages, where), Boto3("boto3", pages, where)
            sides = (ours, bare, other, plain)
            for side in sides:
                stack.enter_context(closing(side))
            for what in ("put", "get"):
                seen = rounds(
                    sides, what, setting.rounds, times_of(shape, setting.least), _cleared(where)
                )
                head = f"{what} {size_name(size)} x {batch}"
                yield speeds(f"{head}, verified", seen, shape, ours, other, _OF_OBSTORE)
                yield speeds(f"{head}, bare", seen, shape, bare, other, None)
                least = _OF_BOTO3 if size <= 1024 * KIB else None
                yield speeds(f"{head}, verified", seen, shape, ours, plain, least)


def exists(setting: Setting) -> Iterator[Figure]:
    """Lookups of 128 keys of which 0, 77 and all are there: requests, and time inside the stack."""
    shape = Shape(_SMALL_PAGE, 128)
    bounds = {0: 16, 77: 141, 128: 128}
    with stub(setting.folder) as where, closing(Ours("ours", Memory(shape), where)) as ours:
        ours.put(0)
        for present, most in bounds.items():
            asked(where)
            ours.exists(0, present)
            sent = asked(where).get("HEAD", 0)
            halves = [ours.exists(0, present).wall for _ in range(_LOOKUPS * setting.rounds)]
            yield Figure(f"exists, {present} of 128 keys there", "requests", sent,
                         goals=(at_most(sent, most),))  # fmt: skip
            yield Figure(f"exists, {present} of 128 keys there", "ms", median(halves) * 1e3)


def real(setting: Setting) -> Iterator[Figure]:
    """Sets and gets on SeaweedFS, whose own speed is the limit."""
    for size in (64 * KIB, 1024 * KIB):
        shape = Shape(size, 64)
        with seaweedfs(setting.folder) as where, ExitStack() as stack:
            pages = Memory(shape)
            sides = (Ours("ours", pages, where), Obstore("obstore", pages, where))
            for side in sides:
                stack.enter_context(closing(side))
            seen = rounds(sides, "get", setting.rounds, times_of(shape, setting.least))
            yield speeds(f"SeaweedFS get {size_name(size)} x 64, verified", seen, shape, *sides,
                          None)  # fmt: skip


def peers(setting: Setting) -> Iterator[Figure]:
    """LMCache's own client, on the stub: it has the bucket in the host's name, as AWS does."""
    for size, batch in ((64 * KIB, 128), (1024 * KIB, 32)):
        shape = Shape(size, batch)
        with stub(setting.folder) as where, ExitStack() as stack:
            pages = Memory(shape)
            ours = Ours("ours", pages, where)
            peer = LMCache("lmcache", pages, where, setting.folder, setting.lmcache)
            for side in (ours, peer):
                stack.enter_context(closing(side))
            for what in ("put", "get"):
                seen = rounds(
                    (ours, peer),
                    what,
                    setting.rounds,
                    times_of(shape, setting.least),
                    _cleared(where),
                )
                least = 1.3 if (what, size) == ("get", 64 * KIB) else None
                yield speeds(f"{what} {size_name(size)} x {batch}", seen, shape, ours, peer, least)
    yield from _lookups(setting)


def _lookups(setting: Setting) -> Iterator[Figure]:
    """Lookups by processes that have not seen the keys: LMCache remembers those that it has."""
    shape = Shape(_SMALL_PAGE, 128)
    count = 1 + setting.rounds * _FIRST_LOOKUPS
    with stub(setting.folder) as where, ExitStack() as stack:
        pages = Memory(shape)
        ours = Ours("ours", pages, where)
        writer, reader = (
            LMCache(name, pages, where, setting.folder, setting.lmcache)
            for name in ("lmcache", "lmcache again")
        )
        for side in (ours, writer, reader):
            stack.enter_context(closing(side))
        if count > pages.turns:
            raise SystemExit(f"--pairs: at most {(pages.turns - 1) // _FIRST_LOOKUPS} here")
        for side in (ours, writer):
            for number in range(count):
                side.put(number)
        for present, most in ((None, 0.9), (0, 0.3)):
            pairs = Pairs(shape.batch_bytes)
            for number in range(count):
                for side, halves in ((ours, pairs.ours), (reader, pairs.other)):
                    halves.append(side.exists(number, present))
            warm = replace(pairs, ours=pairs.ours[1:], other=pairs.other[1:])
            there = "all" if present is None else "none"
            yield Figure.times(f"exists, 128 keys, {there} there", warm, "lmcache", most=most)


def _cleared(where: Where) -> Callable[[Side, int], None]:
    """Ours has the server refuse what is there already."""
    return lambda side, number: clear(where)


class _Socket:
    """One connection and nothing else."""

    def __init__(self, where: Where) -> None:
        host, _, port = where.endpoint.partition("//")[2].partition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, data: bytes) -> None:
        self._socket.sendall(b"PUT /bucket/x HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(data))
        self._socket.sendall(data)
        self._socket.recv(1000)

    def get(self, size: int) -> None:
        self._socket.sendall(b"GET /bucket/x HTTP/1.1\r\n\r\n")
        buffer = memoryview(bytearray(size + 1000))
        got, whole = 0, size + 1000
        while got < whole:
            got += self._socket.recv_into(buffer[got:])
            if whole == size + 1000 and (end := bytes(buffer[:1000]).find(b"\r\n\r\n")) > 0:
                whole = size + end + 4

    def close(self) -> None:
        self._socket.close()
