"""Our store against peers: both on the same disk, batch by batch, each first in turn."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from figures import Figure, Goal, Half, Pairs, at_most, paired
from ours import PLACE, Store, batches_that_fit
from pages import SHAPES, Batch, Memory
from peer import PeerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ours import Setting
    from pages import Shape

__all__ = ["fs_native", "raw_block", "sglang"]

_64K, _128K, _1M = 64 << 10, 128 << 10, 1 << 20


class _Least(NamedTuple):
    """Goals: speed as a multiple of the peer's, CPU a GB as a share of the peer's."""

    speed: float
    cpu: float


_SGLANG = {
    ("read", _64K): _Least(2.4, 0.2), ("read", _128K): _Least(1.6, 0.2),
    ("write", _64K): _Least(5, 0.2), ("write", _128K): _Least(5, 0.2),
}  # fmt: skip
_RAW_BLOCK = {("read", _64K): _Least(1.15, 0.4), ("write", _64K): _Least(1.5, 0.3)}
_Goals = dict[tuple[str, int], _Least]


def sglang(setting: Setting) -> Iterator[Figure]:
    """SGLang's `file`: reads cold, writes before they are synced."""
    for shape in SHAPES[:3]:
        yield from _cold(setting, "sglang", shape, _SGLANG)


def raw_block(setting: Setting) -> Iterator[Figure]:
    """LMCache's raw_block with io_uring, O_DIRECT as ours."""
    for shape in SHAPES[:3]:
        yield from _cold(setting, "raw_block", shape, _RAW_BLOCK)


def fs_native(setting: Setting) -> Iterator[Figure]:
    """LMCache's fs_native: cold against io=direct, warm against io=page."""
    for shape in SHAPES[:3]:
        yield from _cold(setting, "fs_native", shape, {})
    for shape in SHAPES[1:3]:
        yield from _warm(setting, shape)


class _Both:
    """Our store and a peer, with the same batches stored."""

    def __init__(self, setting: Setting, name: str, shape: Shape, *options: str) -> None:
        self._setting, self.shape, self._options = setting, shape, options
        self._capacity = setting.capacity * 3 // 4
        self.fits = batches_that_fit(self._capacity, shape)
        self.memory = Memory(shape)
        slots = self.memory.turns * shape.batch
        self._ours = self._new()
        self.peer = PeerProcess(setting, name, shape, slots, self.fits)
        self.stored = 0

    def _new(self) -> Store:
        return Store.new(
            self._setting, self.shape, self.memory, "ours", *self._options,
            capacity=self._capacity,
        )  # fmt: skip

    @property
    def ours(self) -> Store:
        return self._ours

    def write(self, count: int, pairs: Pairs) -> None:
        """Stores so many batches on both sides, into empty stores whenever they are full."""
        while count:
            if self.stored == self.fits:
                self._ours.close()
                self._ours = self._new()
                self.peer.clear()
                self.stored = 0
            first, part = self.stored, min(count, self.fits - self.stored)
            paired(
                part,
                lambda i, first=first: self._ours.write(self.batch(first + i), first + i)[0],
                lambda i, first=first: self.peer.put(first + i),
                pairs,
            )
            self.stored, count = first + part, count - part

    def batch(self, number: int) -> Batch:
        return Batch.numbered(number, self.shape, PLACE)

    def far(self, i: int) -> int:
        """The batch that the peer reads while ours reads the i-th."""
        return (i + self.stored // 2) % self.stored

    def close(self) -> None:
        self.peer.close()
        self._ours.close()


def _cold(setting: Setting, name: str, shape: Shape, goals: _Goals) -> Iterator[Figure]:
    writes, reads = Pairs(shape.batch_bytes), Pairs(shape.batch_bytes)
    with ExitStack() as stack:
        both = _Both(setting, name, shape)
        stack.callback(both.close)
        both.write(1, Pairs(shape.batch_bytes))  # warm-up
        both.write(setting.pairs, writes)
        both.write(max(0, both.fits * 2 // 3 - both.stored), Pairs(shape.batch_bytes))
        left = setting.pairs
        while left:
            both.peer.drop()  # each byte is read once until the next time
            part = min(left, both.stored)
            paired(
                part,
                lambda i: both.ours.read(both.batch(i), i),
                lambda i: both.peer.get(both.far(i)),
                reads,
            )
            left -= part
        lookups = _lookups(both, setting.pairs)
        proof = f"{both.ours.reads.proof('device')}; {name} {both.peer.reads.proof('device')}"
    for op, pairs, note in (("read", reads, proof), ("write", writes, "")):
        least = goals.get((op, shape.page_bytes))
        yield Figure.speeds(
            f"{op}, {'cold, ' * (op == 'read')}{shape.name}", pairs, name,
            least=least.speed if least else None, note=note,
        )  # fmt: skip
        cpu_goals = []
        if least:
            share = pairs.cpu(pairs.ours) / pairs.cpu(pairs.other)
            cpu_goals = [_of_peer(share, least.cpu)]
        yield Figure.cpus(f"  CPU, {op}", pairs, name, cpu_goals)
    ours, theirs = (median(half.wall for half in side) * 1e6 for side in lookups)
    yield Figure(
        f"batch_exists of {shape.batch} keys", "us", ours, theirs, name, ours / theirs,
        pairs=len(lookups[0]),
        goals=(Goal("faster", ours < theirs),) if name == "raw_block" else (),
    )  # fmt: skip


def _of_peer(share: float, bound: float) -> Goal:
    return at_most(share, bound)._replace(text=f"<= {bound:g} x")


def _lookups(both: _Both, count: int) -> tuple[list[Half], list[Half]]:
    pairs = Pairs(0)
    paired(
        count,
        lambda i: both.ours.exists(both.batch(i % both.stored)),
        lambda i: both.peer.exists(i % both.stored),
        pairs,
    )
    return pairs.ours, pairs.other


def _warm(setting: Setting, shape: Shape) -> Iterator[Figure]:
    with ExitStack() as stack:
        both = _Both(setting, "fs_native", shape, "io=page")
        stack.callback(both.close)
        both.write(both.fits * 2 // 3, Pairs(shape.batch_bytes))
        for number in range(both.stored):  # into the page cache, where they are not there yet
            both.ours.read(both.batch(number), number)
            both.peer.get(number)
        for verify, bound in ((False, 0.8), (True, 0.5)):
            pairs = Pairs(shape.batch_bytes)
            both.ours.verify = verify
            both.ours.reads.reset()
            both.peer.reads.reset()
            paired(
                setting.pairs,
                lambda i: both.ours.read(both.batch(i % both.stored), i),
                lambda i: both.peer.get(both.far(i)),
                pairs,
            )
            proof = f"{both.ours.reads.proof('cache')}; peer {both.peer.reads.proof('cache')}"
            how = "with" if verify else "without"
            yield Figure.speeds(
                f"read, io=page, warm, {how} verify, {shape.name}", pairs, "fs_native",
                least=bound if shape.page_bytes == _1M else None, note=proof,
            )  # fmt: skip
            yield Figure.cpus(f"  CPU, {how} verify", pairs, "fs_native")
