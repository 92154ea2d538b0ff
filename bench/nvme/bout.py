"""Ours and the raw loop side by side: the same runs, batch by batch, each first in turn."""

from __future__ import annotations

import shutil
import time
from collections import deque
from typing import TYPE_CHECKING

from figures import Pairs, paired
from pages import Batch
from raw import RawLoop, Run, Watch
from xxhash import xxh3_64

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from figures import Half
    from ours import Store

__all__ = ["Bout"]


class Bout:
    """One store and the raw loop beside it; both are gone at the end.

    Args:
        store: Ours.
        written: Whether the raw loop's files were written before it writes to them.
        mirror: Folder of the raw loop's files.
        before: Called before each half; several processes wait here for each other.
        reads, writes: Pairs to add to.
    """

    def __init__(
        self,
        store: Store,
        *,
        written: bool = False,
        mirror: str = "raw",
        before: Callable[[], object] = lambda: None,
        reads: Pairs | None = None,
        writes: Pairs | None = None,
    ) -> None:
        size = store.shape.batch_bytes
        self._store, self._watch = store, Watch()
        self._mirror = store.setting.new_folder(mirror)
        self._raw = RawLoop(store.setting.workers, self._mirror, written=written)
        self.reads = Pairs(size) if reads is None else reads
        self.writes = Pairs(size) if writes is None else writes
        self._before = before
        self.written = 0
        self.mean_run = 0.0

    def __enter__(self) -> Bout:
        return self

    def __exit__(self, *exc: object) -> None:
        self._raw.close()
        self._store.close()
        shutil.rmtree(self._mirror, ignore_errors=True)

    def write_pairs(self, count: int, first: int) -> None:
        """Writes new batches, numbers from `first`; the raw loop writes the runs they became."""
        store, memory, place = self._store, self._store.memory, self._store.place
        waiting: deque[list[Run]] = deque()

        def ours(i: int) -> Half:
            number = first + self.written
            batch = Batch.numbered(number, store.shape, place)
            half, runs = store.write(batch, number, self._watch, self._before)
            self.written += 1
            waiting.append(runs)
            return half

        def raw(i: int) -> Half:
            turn = first + self.written + memory.turns // 2
            return self._raw.write(waiting.popleft(), memory.pieces(turn), self._before)

        ours(0)  # warm-up, and the raw loop is always one batch behind
        paired(count, ours, raw, self.writes)

    def read_pairs(self, count: int, batches: Sequence[Batch]) -> None:
        """Reads stored batches; the raw loop reads the runs of one half the store away."""
        store, memory = self._store, self._store.memory
        runs = [store.runs(batch, self._watch) for batch in batches]
        lengths = [run.length for part in runs for run in part]
        self.mean_run = sum(lengths) / len(lengths)

        def ours(i: int) -> Half:
            return store.read(batches[i % len(batches)], i, self._before)

        def raw(i: int) -> Half:
            at = (i + len(runs) // 2) % len(runs)
            turn = i + memory.turns // 2
            memory.poison(turn)  # so that both find the CPU's caches alike
            half = self._raw.read(runs[at], memory.pieces(turn), self._before)
            self._sum(memory.pieces(turn)[::4])
            return half

        paired(count, ours, raw, self.reads)

    def _sum(self, pages: Sequence[Sequence[memoryview]]) -> None:
        """Sums pages that were just read with nothing but xxh3: what no reader can go below."""
        cpu = time.thread_time()
        for pieces in pages:
            state = xxh3_64()
            for piece in pieces:
                state.update(piece)
        self.reads.sum_cpu += time.thread_time() - cpu
        self.reads.sum_bytes += sum(piece.nbytes for pieces in pages for piece in pieces)
