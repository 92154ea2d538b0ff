"""What L3Store itself costs, against its goals: ``python bench/overhead.py [--json]``.

Every figure is a median over repeats, with the lowest and highest beside it: the spread of this
machine. Costs in microseconds are CPU time of the calling thread, so that waiting for a core that
another process holds is not counted; ratios are wall times, paired and alternated batch by batch.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import tempfile
import time
import tracemalloc
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from l3store import page, registry
from l3store.abc import Backend, Capabilities
from l3store.bench import Plan, bench
from l3store.bench.ruler import pool_bytes
from l3store.config import StoreURL
from l3store.keys import Chain
from l3store.metrics import Metrics
from l3store.replay.payload import aligned_buffer
from l3store.wrap import Breaker, Deadline, Metered, Verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from l3store.abc import Check, Segments

BATCH = 128
PLACE = "overhead-0123456789abcdef0123/kv/T0of2"
REPEATS = 15
MIB = 1 << 20


class Figure(NamedTuple):
    """One line of the table."""

    what: str
    unit: str
    values: list[float]
    goal: float | None = None
    at_most: bool = True

    @property
    def good(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        if self.goal is None:
            return None
        value = median(self.values)
        return value <= self.goal if self.at_most else value >= self.goal


class Null(Backend):
    """Does nothing: what is left is the cost of the wrappers."""

    def __init__(self, interruptible: bool) -> None:
        self.capabilities = Capabilities(interruptible=interruptible, late="wait")

    @classmethod
    def from_url(cls, url: StoreURL) -> Null:
        raise NotImplementedError(f"{url}: the null backend has no address")

    def batch_exists(self, keys: Sequence[str]) -> int:
        return len(keys)

    def page_get(
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        return [True] * len(keys)

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:
        return [True] * len(keys)

    def put_meta(self, name: str, data: bytes) -> None:
        return None

    def get_meta(self, name: str) -> bytes | None:
        return None

    def list_meta(self) -> list[str]:
        return []

    def health(self) -> None:
        return None

    def close(self) -> None:
        return None


def chain_of(count: int, first: int = 0) -> Chain:
    """Returns a chain of made-up hashes."""
    return Chain(tuple((first + i + 1).to_bytes(32, "little") for i in range(count)))


def cut(buffer: memoryview, segments: int) -> list[memoryview]:
    """Returns a payload in equal pieces."""
    step = len(buffer) // segments
    return [buffer[at : at + step] for at in range(0, len(buffer), step)]


def cost_a_page(call: Callable[[], object], less: Callable[[], object]) -> list[float]:
    """Returns the microseconds a page of `call` minus those of `less`, a value a repeat."""

    def seconds(one: Callable[[], object]) -> float:
        start = time.thread_time()
        for _ in range(50):
            one()
        return time.thread_time() - start

    call(), less()
    return [(seconds(call) - seconds(less)) / (50 * BATCH) * 1e6 for _ in range(REPEATS)]


def keys_and_header() -> Iterator[Figure]:
    """Chain.keys and page.seal, less the bare checksums of the payloads."""
    chain = chain_of(BATCH)
    for segments in (1, 2):
        payloads = [cut(memoryview(os.urandom(16)), segments) for _ in range(BATCH)]
        whole = [b"".join(pieces) for pieces in payloads]

        def named_and_sealed(payloads: Sequence[Sequence[memoryview]] = payloads) -> None:
            chain.keys(PLACE)
            page.seal(PLACE, chain, payloads)

        def summed(whole: Sequence[bytes] = whole) -> None:
            for payload in whole:
                xxh3_64_intdigest(payload)

        values = cost_a_page(named_and_sealed, summed)
        yield Figure(f"keys + header, {segments} segments", "us a page", values, 1.5)


def verify() -> Iterator[Figure]:
    """Each byte comes from memory: the same bytes are met again after more than all caches hold."""
    for size in (64 << 10, 128 << 10, MIB):
        batches = max(2, -(-2 * pool_bytes() // (size * BATCH)))
        batches += batches % 2
        buffers = aligned_buffer(batches * BATCH, size)
        noise = os.urandom(size)
        for buffer in buffers:
            buffer[:] = noise
        for segments in (1, 2):
            yield _verify(buffers, size, segments, batches)


def _verify(buffers: list[memoryview], size: int, segments: int, batches: int) -> Figure:
    parts = [slice(i * BATCH, (i + 1) * BATCH) for i in range(batches)]
    chains = [chain_of(BATCH, i * BATCH) for i in range(batches)]
    pieces = [cut(buffer, segments) for buffer in buffers]
    headers = [
        b"".join(bytes(one[0]) for one in page.seal(PLACE, chain, pieces[part]))
        for chain, part in zip(chains, parts, strict=True)
    ]

    verified = Verify(Null(interruptible=True), metrics=Metrics())

    def checked(i: int) -> float:
        # As in a call: names, segments and headers are fresh, payloads come from memory.
        keys, into = chains[i].keys(PLACE), page.frame(pieces[parts[i]])
        for at, segments in enumerate(into):
            segments[0][:] = headers[i][at * page.HEADER_BYTES : (at + 1) * page.HEADER_BYTES]
        start = time.perf_counter()
        good = verified.page_get(keys, into)
        took = time.perf_counter() - start
        if not all(good):
            raise SystemExit("verify refused a good page")
        return took

    def summed(i: int) -> float:
        """Bare xxh3: in one go over one piece, as a stream over two, as it must be there."""
        start = time.perf_counter()
        if segments == 1:
            for (piece,) in pieces[parts[i]]:
                xxh3_64_intdigest(piece)
        else:
            for first, second in pieces[parts[i]]:
                state = xxh3_64(first)
                state.update(second)
                state.intdigest()
        return time.perf_counter() - start

    ratios = []
    for _ in range(7):
        ours = bare = 0.0
        for i in range(batches):
            far = (i + batches // 2) % batches
            if i % 2:
                ours, bare = ours + checked(i), bare + summed(far)
            else:
                bare, ours = bare + summed(far), ours + checked(i)
        ratios.append(ours / bare)
    return Figure(f"verify, {size >> 10} KiB, {segments} segments", "x of bare xxh3", ratios, 1.15)


def stack() -> Iterator[Figure]:
    """The wrappers above verify, over a backend that does nothing."""
    chain = chain_of(BATCH)
    keys, into = chain.keys(PLACE), page.frame([(memoryview(bytearray(16)),)] * BATCH)
    for interruptible in (True, False):
        null, metrics = Null(interruptible), Metrics()
        bounded = Deadline(null, 5.0, metrics=metrics)
        breaker = Breaker(bounded, late_calls=bounded.late_calls, metrics=metrics)
        whole = Metered(breaker, name="null", metrics=metrics)
        kind = "interruptible" if interruptible else "late=wait"
        for op in ("page_get", "page_set"):
            called, bare = getattr(whole, op), getattr(null, op)
            values = cost_a_page(partial(called, keys, into), partial(bare, keys, into))
            yield Figure(f"metered + breaker + deadline, {op}, {kind}", "us a page", values, 1.0)


def memory_get() -> Iterator[Figure]:
    """The memory backend as `l3store bench --raw` sees it."""
    plan = Plan(ops=("get",), page_bytes=(MIB,), segments=(1,), working_set=512 * MIB, rounds=1)
    ratios = []
    for _ in range(5):
        with registry.open("memory://", raw=True) as backend:
            row = bench(backend, plan, StoreURL.parse("memory://"), raw=True).rows[0]
        if row.mismatched_pages or row.missed_pages or row.of_memcpy is None:
            raise SystemExit("memory did not give back what it took")
        ratios.append(row.of_memcpy)
    yield Figure("memory get, 1 MiB, without verify", "x of memcpy", ratios, 0.9, at_most=False)


def allocation() -> Iterator[Figure]:
    """What a call allocates besides the caller's buffers."""
    with tempfile.TemporaryDirectory() as folder:
        for name, url in (("memory", "memory://"), ("file", f"file://{folder}/store?deadline=60s")):
            yield from _allocation(name, url)
            gc.collect()


def _allocation(name: str, url: str) -> Iterator[Figure]:
    count = 1024
    chain, keys = chain_of(count), chain_of(count).keys(PLACE)
    buffers = aligned_buffer(count, MIB)
    for i, buffer in enumerate(buffers):
        buffer[:] = bytes([i % 251]) * MIB
    backend = registry.open(url)
    for at in range(0, count, BATCH):
        here = slice(at, at + BATCH)
        pages = page.seal(PLACE, chain[here], [(one,) for one in buffers[here]])
        if not all(backend.page_set(keys[here], pages)):
            raise SystemExit(f"{name} did not store a page")
    if backend.capabilities.durable:
        backend.close()  # what writing needed must not lie ready for reading
        backend = registry.open(url)
    into = page.frame([(buffer,) for buffer in buffers])
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak from here on
    before = _resident("VmRSS")
    if not all(backend.page_get(keys, into)):
        raise SystemExit(f"{name} did not give back a page")
    grown = (_resident("VmHWM") - before) / MIB
    tracemalloc.start()
    backend.page_get(keys, into)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    backend.close()
    yield Figure(f"1 GiB page_get of {name}: peak of resident memory", "MiB more", [grown], 64)
    yield Figure(f"1 GiB page_get of {name}: peak of Python's heap", "MiB more", [peak / MIB], 64)


def _resident(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    """Prints the table, or one JSON object."""
    parser = argparse.ArgumentParser(description="What L3Store itself costs, against its goals.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parts = (keys_and_header, stack, verify, memory_get, allocation)
    show(itertools.chain.from_iterable(part() for part in parts), as_json=parser.parse_args().json)


def show(found: Iterator[Figure], *, as_json: bool) -> None:
    """Prints each figure as it comes, or all as JSON at the end; and what others did meanwhile."""
    start, busy, own = time.perf_counter(), _busy(), time.process_time()
    figures = []
    for figure in found:
        figures.append(figure)
        if not as_json:
            _print(figure)
    others = (_busy() - busy) - (time.process_time() - own)
    share = max(0.0, others / (time.perf_counter() - start))
    if as_json:
        seen = [
            {"what": one.what, "unit": one.unit, "median": median(one.values), "values": one.values,
             "goal": one.goal, "at_most": one.at_most, "ok": one.good}
            for one in figures
        ]  # fmt: skip
        json.dump({"cpus": os.cpu_count(), "cpus_of_others": share, "figures": seen},
                  sys.stdout, indent=1)  # fmt: skip
        print()
        return
    judged = [one.good for one in figures if one.good is not None]
    print(f"meanwhile other work kept {share:.1f} of {os.cpu_count()} CPUs busy")
    print(f"{sum(judged)} of {len(judged)} goals reached")


def _busy() -> float:
    """Returns the seconds that all CPUs of the machine have worked."""
    with open("/proc/stat", encoding="ascii") as lines:
        _, *ticks = lines.readline().split()
    idle, waiting = 3, 4
    worked = sum(int(value) for at, value in enumerate(ticks[:8]) if at not in (idle, waiting))
    return worked / os.sysconf("SC_CLK_TCK")


def _print(one: Figure) -> None:
    low, high = min(one.values), max(one.values)
    spread = f"({low:.2f} to {high:.2f})" if len(one.values) > 1 else ""
    goal = "" if one.goal is None else f"{'<=' if one.at_most else '>='} {one.goal:g}"
    verdict = {None: "-", True: "ok", False: "MISSED"}[one.good]
    print(
        f"{one.what:<58}{median(one.values):>8.2f} {one.unit:<16}{spread:<18}{goal:>8}  {verdict}",
        flush=True,
    )


if __name__ == "__main__":
    main()
