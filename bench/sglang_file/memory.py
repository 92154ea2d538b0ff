"""The engine's host pool: memory for batches in turn, filled and compared by its own calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from engine import Engine

from l3store.bench.ruler import pool_bytes
from l3store.replay.engine import page_hashes
from l3store.replay.payload import Payloads

if TYPE_CHECKING:
    from engine import Geometry

__all__ = ["BATCH", "Memory", "names"]

BATCH = 128
"""Pages of a call: the most that sglang's controller moves in one."""


class Memory:
    """A host pool for more batches than the largest CPU cache holds.

    A page's bytes are the flat ones of sglang's `get_data_page`, so that what is written and
    compared does not depend on how a storage backend finds its way in the pool.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.batch_bytes = geometry.page_bytes * BATCH
        self.turns = max(2, -(-pool_bytes() // self.batch_bytes))
        self.engine = Engine(geometry, self.turns * BATCH)
        self._host = self.engine.host
        self._payloads = Payloads(geometry.page_bytes, 0)
        self._page = memoryview(bytearray(geometry.page_bytes))
        self._flat = torch.frombuffer(self._page, dtype=self._host.dtype)
        for turn in range(self.turns):  # untouched memory is one shared page of zeros
            self.poison(turn)

    def indices(self, turn: int) -> torch.Tensor:
        """Returns the host indices of a turn's pages, as the controller hands them on."""
        return self.engine.indices(self._pages(turn))

    def fill(self, number: int, turn: int) -> None:
        """Writes the pages of batch `number` into those of a turn."""
        for value, at in zip(_values(number), self._pages(turn), strict=True):
            self._payloads.write(value, self._page)
            self._put(at)

    def poison(self, turn: int) -> None:
        """Fills a turn's pages with what no page is: one that nobody wrote is told by `wrong`."""
        self._payloads.poison(self._page)
        for at in self._pages(turn):
            self._put(at)

    def wrong(self, number: int, turn: int) -> int:
        """Returns how many pages of a turn are not those of batch `number`, every byte of them."""
        tokens, wrong = self.engine.geometry.tokens, 0
        for value, at in zip(_values(number), self._pages(turn), strict=True):
            self._flat.copy_(self._host.get_data_page(at * tokens))
            wrong += not self._payloads.matches(value, self._page)
        return wrong

    def _put(self, at: int) -> None:
        self._host.set_from_flat_data_page(at * self.engine.geometry.tokens, self._flat)

    def _pages(self, turn: int) -> range:
        start = turn % self.turns * BATCH
        return range(start, start + BATCH)


def names(number: int) -> list[str]:
    """Returns the page hashes of batch `number`, a prefix of its own, as the engine has them."""
    return [value.hex() for value in _values(number)]


def _values(number: int) -> tuple[bytes, ...]:
    return page_hashes(0, range(number * BATCH, (number + 1) * BATCH))
