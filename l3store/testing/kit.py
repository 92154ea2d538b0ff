"""What the suite's tests are made of: sealed pages, guarded buffers, and a second process."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from l3store import page
from l3store.keys import Chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.abc import Backend, Segments

__all__ = ["PLACE", "Guarded", "Pages", "bare", "promise", "second_process"]

PLACE = "conformance-0/kv/T0of2"

promise = pytest.mark.promise
"""Marks a test with the promise that it is about."""


def bare(store: Backend) -> Backend:
    """Returns the backend inside its wrappers."""
    while hasattr(store, "inner"):
        store = store.inner
    return store


@dataclass
class Pages:
    """Consecutive pages of one prefix with random payloads; the same ones for the same seed."""

    count: int = 8
    size: int = 4096
    segments: int = 1
    place: str = PLACE
    seed: int = 0
    chain: Chain = field(init=False)
    payloads: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.chain = Chain.from_tokens(
            range(self.seed * 100_000, self.seed * 100_000 + self.count), 1
        )
        rng = random.Random(self.seed)
        self.payloads = [rng.randbytes(self.size) for _ in range(self.count)]

    @property
    def keys(self) -> list[str]:
        """The object names."""
        return self.chain.keys(self.place)

    def sealed(self) -> list[Segments]:
        """The pages as `page_set` takes them, in fresh memory."""
        return page.seal(
            self.place, self.chain,
            [_cut(memoryview(bytearray(data)), self.segments) for data in self.payloads],
            clock=lambda: 1,
        )  # fmt: skip

    def stored(self, i: int) -> bytes:
        """The bytes of page i, header first, as a store that keeps them plainly has them."""
        return b"".join(self.sealed()[i])

    def room(self, *, offset: int = 0) -> Guarded:
        """Buffers for all pages."""
        return Guarded(self.count, self.size, self.segments, offset)

    def wrong(self, done: Sequence[bool], room: Guarded) -> list[int]:
        """Returns which pages of a `page_get` were called read and are not what was stored."""
        return [i for i, good in enumerate(done) if good and room.payload(i) != self.payloads[i]]


def _cut(data: memoryview, pieces: int) -> list[memoryview]:
    """Cuts a payload into so many pieces of unequal, often odd, length."""
    rng = random.Random(len(data) * 1000 + pieces)
    cuts = sorted(rng.sample(range(1, len(data)), pieces - 1)) if pieces > 1 else []
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


class Guarded:
    """Poisoned buffers in one stretch of memory, a canary before, between and behind them.

    Args:
        count: Pages.
        size: Payload bytes.
        segments: Pieces of each payload.
        offset: Of the first buffer from an address divisible by 4096, roughly: odd ones make every
            buffer unaligned.
    """

    CANARY = b"\xc5" * 64
    POISON = 0xA7

    def __init__(self, count: int, size: int, segments: int, offset: int = 0) -> None:
        self._size, self._count = size, count
        stride = 128 + size + 2 * len(self.CANARY)
        self._memory = bytearray([self.POISON]) * (offset + stride * count)
        view = memoryview(self._memory)
        self._canaries: list[memoryview] = [view[:offset]]
        self.pages: list[Segments] = []
        for at in range(offset, offset + stride * count, stride):
            header_end = at + 128
            payload = header_end + len(self.CANARY)
            self._canaries += [view[header_end:payload], view[payload + size : at + stride]]
            self.pages.append(
                (view[at:header_end], *_cut(view[payload : payload + size], segments))
            )
        for canary in self._canaries[1:]:
            canary[:] = self.CANARY

    def payload(self, i: int) -> bytes:
        """The bytes that now stand in page i's payload."""
        return b"".join(self.pages[i][1:])

    def page(self, i: int) -> bytes:
        """The bytes that now stand in page i, header first."""
        return b"".join(self.pages[i])

    def intact(self) -> bool:
        """Returns whether nothing was written outside the buffers."""
        return all(bytes(canary) == self.CANARY for canary in self._canaries[1:]) and all(
            byte == self.POISON for byte in self._canaries[0]
        )

    def untouched(self) -> bool:
        """Returns whether nothing was written at all."""
        poison = bytes([self.POISON])
        return self.intact() and all(
            self.page(i) == poison * (128 + self._size) for i in range(self._count)
        )

    def reuse(self) -> None:
        """Fills every page as its owner would who uses it for something else."""
        for segments in self.pages:
            for piece in segments:
                piece[:] = bytes([self.POISON]) * piece.nbytes


def second_process(url: str, code: str) -> subprocess.Popen[str]:
    """Starts a process that runs `code` with ``store`` open at `url`, `Pages` and `time` at hand.

    It prints what `code` prints, line by line; its standard input is a pipe.
    """
    prelude = (
        "import sys, time\n"
        "from l3store import registry\n"
        "from l3store.testing.kit import Pages\n"
        "store = registry.open(sys.argv[1])\n"
        "def say(*what): print(*what, flush=True)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
