"""The figures: rounds in which all sides move the same pages, one after the other."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from figures import Figure, Pairs
from pages import KIB, Memory, Shape, size_name
from rounds import rounds, speeds, times_of
from sides import Bare, Ours

from l3store.servers.mooncake import MooncakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


__all__ = ["Setting", "exists", "transfers"]

_MIB = 1024 * KIB
SHAPES = (
    Shape(64 * KIB, 32), Shape(64 * KIB, 128), Shape(512 * KIB, 32), Shape(512 * KIB, 128),
    Shape(2 * _MIB, 32), Shape(2 * _MIB, 128), Shape(8 * _MIB, 32),
)  # fmt: skip
_SEGMENT = 4 << 30
_LEAST_PAGE, _LEAST = 512 * KIB, 0.9
_SMALL_PAGE = 4 * KIB  # of lookups, which no page's size touches
_LOOKUPS = 20


@dataclass(frozen=True)
class Setting:
    """What one run is told on its command line."""

    rounds: int
    shapes: Sequence[Shape]
    least: int
    """Bytes that a side moves at least in a round; fewer are too short to time."""


def transfers(setting: Setting, where: str) -> Iterator[Figure]:
    """Puts and gets of pages that lie with another process (``two``) or in this one (``one``)."""
    with _server(where) as (server, url):
        for shape in setting.shapes:
            with ExitStack() as stack:
                pages = Memory(shape)
                ours = [
                    Ours("bare", pages, url), Ours("verified", pages, url, late="wait"),
                    Ours("staged", pages, url, late="staged"),
                ]  # fmt: skip
                for side in ours:
                    stack.enter_context(closing(side))
                calls = Bare("calls", pages, ours[0])
                _warm(server, calls)
                sides = (calls, *ours)
                for what in ("put", "get"):
                    seen = rounds(
                        sides,
                        what,
                        setting.rounds,
                        times_of(shape, setting.least),
                        lambda side, number: side.remove(number),
                    )
                    for side in ours:
                        goal = _goal(shape, where, side.name)
                        head = f"{what} {where} {size_name(shape.page_bytes)} x {shape.batch}"
                        yield speeds(f"{head}, {side.name}", seen, shape, side, calls, goal)
                for side in sides:
                    for number in range(side.count):
                        side.remove(number)


def exists(setting: Setting) -> Iterator[Figure]:
    """Lookups of pages that are all there, inside the wrappers that do not wait."""
    with _server("two") as (_, url):
        for batch in (128, 1024):
            shape = Shape(_SMALL_PAGE, batch)
            pages = Memory(shape)
            with (
                closing(Ours("bare", pages, url)) as bare,
                closing(Ours("stack", pages, url, late="wait")) as stack,
            ):
                calls = Bare("calls", pages, bare)
                seen = rounds((calls, bare, stack), "exists", setting.rounds, _LOOKUPS)
                for side in (bare, stack):
                    pairs = Pairs(shape.batch_bytes, seen[side.name], seen[calls.name])
                    yield Figure.times(f"exists, {batch} keys, {side.name}", pairs, calls.name)


def _goal(shape: Shape, where: str, name: str) -> float | None:
    if shape.page_bytes < _LEAST_PAGE or name == "staged":
        return None
    return None if where == "one" and name == "verified" else _LEAST


@contextmanager
def _server(where: str) -> Iterator[tuple[MooncakeServer, str]]:
    # Nothing is evicted, and nothing is kept from removal.
    settings = {"eviction_high_watermark_ratio": 1, "default_kv_lease_ttl": 10_000}
    owners = 1 if where == "two" else 0
    with MooncakeServer(segment=_SEGMENT, owners=owners, settings=settings) as server:
        lends = "" if owners else f"&segment={_SEGMENT}"
        yield server, server.url + lends


def _warm(server: MooncakeServer, calls: Bare) -> None:
    """Touches all the memory that is lent: the first touch is many times slower."""
    piece = mmap.mmap(-1, 16 * _MIB)
    start = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    names = [f"warm/{n}" for n in range(_SEGMENT // len(piece))]
    if sum(used for used, _ in server.segments().values()) > 16 * _MIB:
        return
    for name in names:
        calls.library.put_from(name, start, len(piece))
    calls.library.batch_remove(names, True)
