"""1, 2 and 4 processes on one store, each writing a shard of its own and reading its neighbour's.

All wait for each other before each half of a pair, so that ours never meets another's raw loop. A
pair counts as long as its slowest process takes.
"""

from __future__ import annotations

import multiprocessing
import queue
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from bout import Bout
from figures import Figure, Half, Pairs
from ours import Store, batches_that_fit
from pages import SHAPES, Batch, Memory

from l3store import registry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

    from ours import Setting
    from pages import Shape

__all__ = ["processes"]

_PATIENCE = 300.0
_Seen = tuple[int, Pairs, Pairs, str]


def processes(setting: Setting) -> Iterator[Figure]:
    """Each process evicts its own pages: the store is full when the clock starts."""
    for shape in SHAPES[1:3]:
        for count in (1, 2, 4):
            yield from _together(setting, shape, count)


def _together(setting: Setting, shape: Shape, count: int) -> Iterator[Figure]:
    folder = setting.new_folder("shared")
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(count), spawn.Queue()
    ranks = [
        spawn.Process(target=_rank, args=(setting, shape, folder, r, count, barrier, results))
        for r in range(count)
    ]
    try:
        for rank in ranks:
            rank.start()
        seen: list[_Seen] = []
        while len(seen) < count:
            with suppress(queue.Empty):
                seen.append(results.get(timeout=1.0))
                continue
            if any(rank.exitcode for rank in ranks):
                raise SystemExit(f"one of {count} processes ended with an error, told above")
        for rank in ranks:
            rank.join()
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()
        shutil.rmtree(folder, ignore_errors=True)
    several = f"{count} process{'es' * (count > 1)}"
    for op, pairs in (("read", [one[1] for one in seen]), ("write", [one[2] for one in seen])):
        whole = _sum(pairs)
        note = seen[0][3] if op == "read" else ""
        yield Figure.speeds(f"{op}, {several}, {shape.name}", whole, "raw loop", note=note)
        yield Figure.cpus(f"  CPU, {op}, {several}", whole, "raw loop")


def _sum(ranks: list[Pairs]) -> Pairs:
    whole = Pairs(sum(one.batch_bytes for one in ranks))
    for side in ("ours", "other"):
        for halves in zip(*(getattr(one, side) for one in ranks), strict=True):
            slowest, cpu = max(half.wall for half in halves), sum(half.cpu for half in halves)
            getattr(whole, side).append(Half(slowest, cpu))
    return whole


def _rank(
    setting: Setting,
    shape: Shape,
    folder: str,
    rank: int,
    count: int,
    barrier: Barrier,
    results: Queue[_Seen],
) -> None:
    def place(of: int) -> str:
        return f"bench-nvme/kv/T{of}of{count}"

    def together() -> None:
        barrier.wait(_PATIENCE)

    url = setting.url(folder, setting.capacity, f"writers={count}")
    memory = Memory(shape)
    backend = registry.open(url, raw=not setting.stacked)
    store = Store(setting, shape, memory, backend, folder, place(rank), lasting=True)
    fits = batches_that_fit(setting.capacity, shape) // count
    filled = 2 * fits
    for number in range(filled):
        store.write(Batch.numbered(number, shape, store.place), number)
    with Bout(store, written=True, mirror=f"raw{rank}", before=together) as bout:
        bout.write_pairs(setting.pairs, filled)
        together()
        end = filled + bout.written
        neighbour = place((rank + 1) % count)
        newest = [Batch.numbered(n, shape, neighbour) for n in range(end - fits * 3 // 4, end)]
        bout.read_pairs(setting.pairs, newest)
        together()  # nobody's files go while another one reads them
    results.put((rank, bout.reads, bout.writes, store.reads.proof("device")))
