"""The figures: rounds in which all sides move the same pages, one after the other."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from clients import LMCACHE, PEERS, Peer
from figures import Figure, Half, Pairs, at_most
from pages import KIB, Memory, Shape, size_name
from rounds import Side, rounds, speeds, times_of
from sides import Ours, Raw, RedisPy

from l3store.servers.process import HOST
from l3store.servers.redis import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


__all__ = ["KINDS", "SIZES", "Setting", "exists", "memory", "peers", "transfers"]

KINDS: tuple[Literal["valkey", "redis"], ...] = ("valkey", "redis")
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
_BATCHES = (32, 128)
_SMALL_PAGE = 4 * KIB  # of lookups, which no page's size touches
_MIB = 1024 * KIB
_RISE = 64
"""MiB that a server's memory may rise by while a batch moves."""
_CALM = 1.0
"""Seconds until a server has given back what the batch took."""
_GOALS = {  # of 1 MiB pages, against one raw connection: bare, verified
    "unix": (0.65, 0.55),
    "tcp": (0.5, 0.45),
}
_OVER_MGET = 2.5
_LOOKUPS = 20


@dataclass(frozen=True)
class Setting:
    """What one run is told on its command line."""

    folder: str
    venvs: str
    rounds: int
    kind: Literal["valkey", "redis"]
    """Which server."""
    sizes: tuple[int, ...]
    """Of pages, for `transfers`."""
    least: int
    """Bytes that a side moves at least in a round; fewer are too short to time."""

    def server(self) -> RedisServer:
        """Starts an empty server."""
        return RedisServer(kind=self.kind)


def transfers(setting: Setting, transport: str) -> Iterator[Figure]:
    """Sets and gets over one transport, beside one raw connection and redis-py."""
    for size in setting.sizes:
        for batch in _BATCHES:
            yield from _transfer(setting, transport, Shape(size, batch))


def _transfer(setting: Setting, transport: str, shape: Shape) -> Iterator[Figure]:
    with setting.server() as server, ExitStack() as stack:
        unix = transport == "unix"
        url = server.unix_url if unix else server.url
        where: dict[str, Any] = (
            {"unix_socket_path": server.unix_path} if unix else {"host": HOST, "port": server.port}
        )
        pages = Memory(shape)
        raw = Raw("raw", pages, setting.folder, unix=unix)
        bare = Ours("bare", pages, url, bare=True)
        verified = Ours("verified", pages, url)
        client = RedisPy("redis-py", pages, **where)
        sides = (raw, bare, verified, client)
        for side in sides:
            stack.enter_context(closing(side))
        goals = _GOALS[transport] if shape.page_bytes == _MIB else (None, None)
        for what in ("put", "get"):
            seen = rounds(
                sides, what, setting.rounds, times_of(shape, setting.least), _emptied(server)
            )
            head = f"{what} {transport} {size_name(shape.page_bytes)} x {shape.batch}"
            for side, least in zip((bare, verified), goals, strict=True):
                yield speeds(f"{head}, {side.name}", seen, shape, side, raw,
                              least if what == "get" else None)  # fmt: skip
            least = _OVER_MGET if goals[0] and what == "get" else None
            yield speeds(f"{head}, verified", seen, shape, verified, client, least)


def peers(setting: Setting) -> Iterator[Figure]:
    """LMCache's own clients on the same server, with as many connections as they use."""
    for size in (64 * KIB, 1024 * KIB):
        shape = Shape(size, 128)
        with setting.server() as server, ExitStack() as stack:
            pages = Memory(shape)
            ours = [
                Ours(f"{count} connection{'s' * (count > 1)}", pages,
                     f"{server.url}?connections={count}")
                for count in (1, LMCACHE)
            ]  # fmt: skip
            theirs = [
                Peer(name, pages, setting.folder, setting.venvs, f"{HOST}:{server.port}")
                for name in PEERS
            ]
            sides = (*ours, *theirs)
            for side in sides:
                stack.enter_context(closing(side))
            for what in ("put", "get"):
                seen = rounds(
                    sides, what, setting.rounds, times_of(shape, setting.least), _emptied(server)
                )
                for mine in ours:
                    for peer in theirs:
                        # The goals are for as many connections as the peer has.
                        least = PEERS[peer.name] if mine is ours[-1] else None
                        yield speeds(f"{what} {size_name(size)} x 128, {mine.name}", seen, shape,
                                      mine, peer, least)  # fmt: skip
            if size == 64 * KIB:
                seen = rounds(sides, "exists", setting.rounds, _LOOKUPS)
                for peer in theirs:
                    yield _times("exists, 128 keys", seen, shape, ours[0], peer,
                                 0.3 if peer.name == "resp" else None)  # fmt: skip


def exists(setting: Setting) -> Iterator[Figure]:
    """Lookups of pages that are all there, inside the wrappers."""
    for transport in ("tcp", "unix"):
        for batch in (128, 1024):
            shape = Shape(_SMALL_PAGE, batch)
            with setting.server() as server, ExitStack() as stack:
                pages = Memory(shape)
                url = server.unix_url if transport == "unix" else server.url
                ours = Ours("ours", pages, url)
                client = RedisPy("redis-py", pages, unix_socket_path=server.unix_path)
                for side in (ours, client):
                    stack.enter_context(closing(side))
                seen = rounds((ours, client), "exists", setting.rounds, _LOOKUPS)
                took = median(half.wall for half in seen["ours"]) * 1e3
                goal = (at_most(took, 3.0),) if batch == 1024 else ()
                pair = Pairs(shape.batch_bytes, seen["ours"], seen["redis-py"])
                line = Figure.times(f"exists {transport}, {batch} keys", pair, "redis-py")
                yield replace(line, goals=goal)


def memory(setting: Setting) -> Iterator[Figure]:
    """How far a server's memory rises above what the data in it takes, while a batch moves."""
    for kind in KINDS:
        for size, batch in ((1024 * KIB, 128), (4096 * KIB, 128)):
            shape = Shape(size, batch)
            ours, other = (_risen(kind, shape, name) for name in ("ours", "redis-py"))
            for what in ("put", "get"):
                yield Figure(
                    f"memory of {kind}, {what} {size_name(size)} x {batch}", "MiB more",
                    ours[what], other[what], "redis-py", goals=(at_most(ours[what], _RISE),),
                    note=f"than at rest with {shape.batch_bytes >> 20} MiB of pages in it",
                )  # fmt: skip


def _risen(kind: Literal["valkey", "redis"], shape: Shape, name: str) -> dict[str, float]:
    """Returns MiB for a put and a get of one batch on a server of its own."""
    with RedisServer(kind=kind) as server, ExitStack() as stack:
        pages = Memory(shape)
        side: Side = (
            Ours(name, pages, server.unix_url) if name == "ours"
            else RedisPy(name, pages, unix_socket_path=server.unix_path)
        )  # fmt: skip
        stack.enter_context(closing(side))
        found = {}
        for what in ("put", "get"):
            resident = _Resident(server)
            getattr(side, what)(0)
            found[what] = resident.risen() / _MIB
        return found


class _Resident:
    """A server's memory as the kernel counts it.

    The servers' own ``used_memory_peak`` cannot be reset.
    """

    def __init__(self, server: RedisServer) -> None:
        self._server, self._folder = server, Path(f"/proc/{server.process.pid}")
        self._data = self._used()
        (self._folder / "clear_refs").write_text("5")  # proc(5): resets VmHWM
        self._rest = self._kib("VmRSS")

    def risen(self) -> int:
        """Returns how far its peak was above its memory before and what data came, in bytes."""
        peak = (self._kib("VmHWM") - self._rest) * KIB
        return max(peak - (self._used() - self._data), 0)

    def _used(self) -> int:
        time.sleep(_CALM)
        used: int = self._server.info("memory")["used_memory"]
        return used

    def _kib(self, name: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise SystemExit(f"{self._folder}/status tells no {name}")


def _emptied(server: RedisServer) -> Callable[[Side, int], None]:
    """Ours does not send what is there already. And all find the same memory."""

    def empty(side: Side, number: int) -> None:
        server.command("FLUSHALL", "SYNC")

    return empty


def _times(
    what: str, seen: dict[str, list[Half]], shape: Shape, ours: Side, other: Side,
    most: float | None,
) -> Figure:  # fmt: skip
    pairs = Pairs(shape.batch_bytes, seen[ours.name], seen[other.name])
    return Figure.times(what, pairs, other.name, most=most)
