"""Our store against the raw loop of the same runs: fresh, overwritten, aged, 64 segments a page."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING

from aged import Aged
from bout import Bout
from disk import Moved
from figures import Figure, Goal, Pairs, at_least, at_most, paired
from ours import PLACE, Store, batches_that_fit
from pages import SHAPES, Batch, Memory, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from figures import Half
    from ours import Setting

__all__ = ["aged", "fresh", "overwritten", "segments"]

_128K, _1M = 128 << 10, 1 << 20
_FRESH = {_128K: (0.92, 0.88), _1M: (0.95, 0.90)}
"""Page bytes -> least read and write speed, as shares of the raw loop's."""


def fresh(setting: Setting) -> Iterator[Figure]:
    """New stores, each filled once; read as it was written."""
    for shape in SHAPES:
        for count in (1, 2):
            yield from _fresh(setting, shape._replace(segments=count))


def segments(setting: Setting) -> Iterator[Figure]:
    """As fresh, with pages that lie in 64 pieces in memory."""
    for shape in SHAPES[1:3]:
        yield from _fresh(setting, shape._replace(segments=64))


def overwritten(setting: Setting) -> Iterator[Figure]:
    """Stores that are full: each write evicts, into slots that were written before."""
    for shape in SHAPES:
        memory = Memory(shape)
        store = Store.new(setting, shape, memory, "ours")
        fits = batches_that_fit(setting.capacity, shape)
        filled = 2 * fits
        for number in range(filled):
            store.write(Batch.numbered(number, shape, PLACE), number)
        with Bout(store, written=True) as bout:
            bout.write_pairs(setting.pairs, filled)
            newest = range(filled + bout.written - fits * 3 // 4, filled + bout.written)
            bout.read_pairs(
                setting.pairs, [Batch.numbered(number, shape, PLACE) for number in newest]
            )
        yield from _figures(
            "overwritten", shape, bout.reads, bout.writes, store.reads.proof("device")
        )


def _fresh(setting: Setting, shape: Shape) -> Iterator[Figure]:
    memory, fits = Memory(shape), batches_that_fit(setting.capacity, shape)
    reads, writes = Pairs(shape.batch_bytes), Pairs(shape.batch_bytes)
    left, seen = setting.pairs, Moved()
    while left:
        count = min(left, fits - 1)  # one is the warm-up
        store = Store.new(setting, shape, memory, "ours")
        store.reads = seen
        with Bout(store, reads=reads, writes=writes) as bout:
            bout.write_pairs(count, 0)
            stored = [Batch.numbered(number, shape, PLACE) for number in range(bout.written)]
            bout.read_pairs(count, stored)
        left -= count
    yield from _figures("fresh", shape, reads, writes, seen.proof("device"))


def aged(setting: Setting) -> Iterator[Figure]:
    """Stores whose capacity the conversation trace has turned over three times.

    Against the raw loop of the same runs, and against a fresh store in the same pairs.
    """
    for shape in SHAPES:
        memory = Memory(shape)
        old = Aged(setting, shape, memory)
        with closing(old), Bout(old.store, written=True) as bout:
            batches = old.batches()
            if len(batches) < 2:
                print(
                    f"aged, {shape.name}: left out, as the trace leaves no two whole batches in a "
                    "store of so few pages",
                    file=sys.stderr,
                )
                continue
            bout.read_pairs(setting.pairs, batches)
            yield from _figures(
                "aged", shape, bout.reads, bout.writes, old.store.reads.proof("device")
            )
            mean = bout.mean_run / _1M
            yield Figure(
                f"mean run read, aged, {shape.name}", "MiB", mean, goals=(at_least(mean, 1.0),),
                note=old.story,
            )  # fmt: skip
            yield from _aged_and_fresh(setting, old, batches)


def _aged_and_fresh(setting: Setting, old: Aged, batches: Sequence[Batch]) -> Iterator[Figure]:
    shape = old.store.shape
    new = _Refilled(setting, shape, old.store.memory, setting.capacity // 2)
    reads, writes = Pairs(shape.batch_bytes), Pairs(shape.batch_bytes)
    try:
        paired(
            setting.pairs,
            lambda i: old.store.read(batches[i % len(batches)], i),
            lambda i: new.read_next(i + 1),
            reads,
        )
        paired(setting.pairs, old.write_next, lambda i: new.write_next(i + 1), writes)
    finally:
        new.store.close()
    for op, pairs in (("read", reads), ("write", writes)):
        yield Figure.speeds(f"{op}, aged, {shape.name}", pairs, "fresh", least=0.85)
        theirs = pairs.cpu(pairs.other)
        yield Figure.cpus(
            f"  CPU, {op}, aged", pairs, "fresh",
            [at_most(pairs.cpu(pairs.ours), 1.5 * theirs)],
        )  # fmt: skip


class _Refilled:
    """A young store that is made anew whenever it would have to evict."""

    def __init__(self, setting: Setting, shape: Shape, memory: Memory, capacity: int) -> None:
        self._setting, self._shape, self._memory = setting, shape, memory
        self._capacity = capacity
        self._fits, self._at = batches_that_fit(capacity, shape), 0
        self.store = self._new()

    def _new(self) -> Store:
        return Store.new(self._setting, self._shape, self._memory, "young", capacity=self._capacity)

    def read_next(self, turn: int) -> Half:
        while self._at < self._fits:
            self.write_next(self._at)
        return self.store.read(Batch.numbered(turn % self._fits, self._shape, PLACE), turn)

    def write_next(self, turn: int) -> Half:
        if self._at == self._fits:
            self.store.close()
            self.store, self._at = self._new(), 0
        half, _ = self.store.write(Batch.numbered(self._at, self._shape, PLACE), turn)
        self._at += 1
        return half


def _figures(state: str, shape: Shape, reads: Pairs, writes: Pairs, proof: str) -> Iterator[Figure]:
    """Speeds and CPU of all pairs against the raw loop."""
    judged = state == "fresh" and shape.segments <= 2
    least = _FRESH.get(shape.page_bytes, (None, None)) if judged else (None, None)
    for op, pairs, bound in (("read", reads, least[0]), ("write", writes, least[1])):
        if not pairs.ours:
            continue
        note = proof if op == "read" else ""
        yield Figure.speeds(
            f"{op}, {state}, {shape.name}", pairs, "raw loop", least=bound, note=note
        )
        goals = _cpu_goals(op, state, shape, pairs)
        yield Figure.cpus(
            f"  CPU, {op}, {state}", pairs, "raw loop", goals, note=pairs.checksum_cost()
        )


def _cpu_goals(op: str, state: str, shape: Shape, pairs: Pairs) -> list[Goal]:
    ours, raw = pairs.cpu(pairs.ours), pairs.cpu(pairs.other)
    if shape.segments > 2:
        return [at_most(ours, 0.45)]
    if op == "write" or state != "fresh":
        return []
    if shape.page_bytes == _128K:
        return [at_most(ours, raw + 0.09, 0.19)]
    return [at_most(ours, 0.12)] if shape.page_bytes == _1M else []
