"""Measures one store: for each page size and number of segments it stores, reads and looks up.

Each call is paired with a memcpy of the same bytes, right before or right after it in turn, so that
what else the machine does meets both alike.
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, TypeVar

from l3store import page
from l3store.abc import Segments
from l3store.bench.figures import Round, Timer, row_of, warnings
from l3store.bench.medium import Medium
from l3store.bench.plan import BenchResult, Plan, Row, check_plan
from l3store.bench.ruler import Ruler, pool_bytes
from l3store.errors import ConfigError, L3Error
from l3store.keys import Chain
from l3store.replay.engine import page_hashes
from l3store.replay.payload import Payloads, aligned_buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from l3store.abc import Backend
    from l3store.config import StoreURL

__all__ = ["NAMESPACE", "bench"]

NAMESPACE = "l3store-bench"
"""Where a run's pages live, apart from all others."""

Result = TypeVar("Result")


def bench(
    backend: Backend,
    plan: Plan,
    url: StoreURL,
    *,
    raw: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> BenchResult:
    """Measures `backend` and removes what it stored, also after an error or an interrupt.

    Blocks until the last round. Memory: three buffers of 1.25 times the largest CPU cache (or one
    batch, if that is more), and what the store itself takes.

    Args:
        backend: An open store; it is not closed.
        plan: What to measure.
        url: Its address, which tells where its bytes lie.
        raw: Whether `backend` is bare; for the report.
        advance: Called with the pages of each timed call.

    Raises:
        ConfigError: A size is impossible or there is no room.
        CapacityError: The store is too small for one batch.
        BackendUnavailable, BackendTimeout: The store does not answer.
    """
    medium = Medium.of(url, backend.capabilities)
    pool = max(pool_bytes(), max(plan.page_bytes) * plan.batch)
    check_plan(plan, backend.capabilities, medium, pools=3 * pool)
    rows: list[Row] = []
    notes: list[str] = []
    for size in plan.page_bytes:
        rig = _Rig(backend, plan, medium, size, pool, advance)
        try:
            for segments in plan.segments:
                rows += rig.measure(segments)
        finally:
            notes += rig.leave()
    return BenchResult(
        url=str(url), verify=not raw,
        stack="none (bare backend)" if raw else "metered, breaker, deadline, verify",
        cache_asked=plan.cache, rounds=plan.rounds, working_set=plan.working_set,
        order="shuffled" if plan.shuffle else "as written", seed=plan.seed,
        warm_up="one batch of each operation for each page size and number of segments, not timed",
        ruler=f"memcpy page by page between two buffers of {pool} bytes",
        rows=rows, notes=warnings(rows, plan.cache) + notes,
    )  # fmt: skip


class _Rig:
    """Buffers, keys and ruler for one page size."""

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        medium: Medium,
        page_bytes: int,
        pool: int,
        advance: Callable[[int], None],
    ) -> None:
        self._backend, self._plan, self._medium = backend, plan, medium
        self._size, self._advance = page_bytes, advance
        self._place = f"{NAMESPACE}/b{page_bytes}/all"  # pages of one place have one length
        slots = -(-pool // (page_bytes * plan.batch)) * plan.batch
        self._buffers = aligned_buffer(min(slots, plan.pages(page_bytes)), page_bytes)
        self._ruler = Ruler(slots, page_bytes)
        self._payloads = Payloads(page_bytes, plan.seed)
        # Another one each run: two runs at once, or one that was killed, must not meet.
        self._next_id = int.from_bytes(os.urandom(5), "little") << 22
        self._stored: list[str] = []
        self._took = 0
        self._left = 0

    def measure(self, segments: int) -> list[Row]:
        """Returns one row an operation."""
        plan, count = self._plan, self._plan.pages(self._size)
        timers = {op: Timer() for op in plan.ops}
        self._round(self._hashes(plan.batch), segments, {})  # the warm-up
        if not self._took:
            raise ConfigError(
                f"the store took none of {plan.batch} pages of {self._size} bytes: it is full, too "
                "small, or cannot be written"
            )
        for _ in range(plan.rounds):
            for timer in timers.values():
                timer.rounds.append(Round())
            self._round(self._hashes(count), segments, timers)
        return [
            row_of(op, timer, self._size, segments, plan.batch, count, self._medium.kind)
            for op, timer in timers.items()
        ]

    def _hashes(self, count: int) -> tuple[bytes, ...]:
        first, self._next_id = self._next_id, self._next_id + count
        return page_hashes(self._plan.seed, range(first, first + count))

    def _round(self, hashes: tuple[bytes, ...], segments: int, timers: dict[str, Timer]) -> None:
        self._stored = Chain(hashes).keys(self._place)
        self._set(hashes, segments, timers.get("set"))
        if not timers or "get" in timers:
            order = list(range(len(hashes)))
            if self._plan.shuffle:
                random.Random(self._plan.seed).shuffle(order)
            if self._plan.cache == "cold":
                self._medium.drop(NAMESPACE)
            elif self._plan.cache == "warm":
                self._get(hashes, order, segments, None)
            self._get(hashes, order, segments, timers.get("get"))
        if not timers or "exists" in timers:
            self._exists(timers.get("exists"))
        self._delete()

    # -- operations ------------------------------------------------------------------------

    def _set(self, hashes: tuple[bytes, ...], segments: int, timer: Timer | None) -> None:
        for part in self._fills(len(hashes)):
            here, payloads = hashes[part.start : part.stop], self._cut(len(part), segments)
            for value, buffer in zip(here, self._buffers, strict=False):
                self._payloads.write(value, buffer)
            keys, pages = self._stored[part.start : part.stop], list[Segments]()
            for at in self._batches(len(part)):  # each is a prefix of its own
                chain = Chain(here[at.start : at.stop])
                pages += page.seal(self._place, chain, payloads[at.start : at.stop])
            with self._medium.counted() as moved:
                for at in self._batches(len(part)):
                    done = self._timed(timer, len(at), self._call_set(keys, pages, at))
                    self._took += sum(done)
                    if timer:
                        timer.missed += len(at) - sum(done)
            if timer:
                timer.add_device(moved.written)

    def _get(
        self,
        hashes: tuple[bytes, ...],
        order: Sequence[int],
        segments: int,
        timer: Timer | None,
    ) -> None:
        for part in self._fills(len(order)):
            chosen = [order[i] for i in part]
            keys = [self._stored[i] for i in chosen]
            for buffer in self._buffers[: len(part)]:
                self._payloads.poison(buffer)
            into, done = page.frame(self._cut(len(part), segments)), list[bool]()
            with self._medium.counted() as moved:
                for at in self._batches(len(part)):
                    done += self._timed(timer, len(at), self._call_get(keys, into, at))
            if timer:
                timer.add_device(moved.read)
                timer.missed += len(done) - sum(done)
                timer.mismatched += sum(
                    good and not self._payloads.matches(hashes[i], buffer)
                    for i, good, buffer in zip(chosen, done, self._buffers, strict=False)
                )

    def _exists(self, timer: Timer | None) -> None:
        with self._medium.counted() as moved:
            for at in self._batches(len(self._stored)):
                keys = self._stored[at.start : at.stop]
                found = self._timed(timer, 0, self._call_exists(keys))
                if timer:
                    timer.missed += len(keys) - found
                    self._advance(len(keys))
        if timer:
            timer.add_device(moved.read)

    def _call_set(
        self, keys: Sequence[str], pages: Sequence[Segments], at: range
    ) -> Callable[[], list[bool]]:
        keys, pages = keys[at.start : at.stop], pages[at.start : at.stop]
        return lambda: self._backend.page_set(keys, pages)

    def _call_get(
        self, keys: Sequence[str], into: Sequence[Segments], at: range
    ) -> Callable[[], list[bool]]:
        keys, into = keys[at.start : at.stop], into[at.start : at.stop]
        return lambda: self._backend.page_get(keys, into)

    def _call_exists(self, keys: Sequence[str]) -> Callable[[], int]:
        return lambda: self._backend.batch_exists(keys)

    def _timed(self, timer: Timer | None, pages: int, call: Callable[[], Result]) -> Result:
        """Runs a call and the ruler over as many pages, each first in turn."""
        if timer is None:
            return call()
        now, ruler_first = timer.rounds[-1], len(timer.each) % 2 == 0
        if ruler_first:
            now.ruler += self._ruler.copy(pages)
        cpu, wall = time.process_time(), time.perf_counter()
        result = call()
        took = time.perf_counter() - wall
        now.cpu += time.process_time() - cpu
        if not ruler_first:
            now.ruler += self._ruler.copy(pages)
        now.wall += took
        timer.each.append(took)
        self._advance(pages)
        return result

    # -- pages -----------------------------------------------------------------------------

    def _fills(self, count: int) -> Iterator[range]:
        """Yields the pages that the buffers hold at one time."""
        step = len(self._buffers)
        yield from (range(at, min(at + step, count)) for at in range(0, count, step))

    def _batches(self, count: int) -> Iterator[range]:
        step = self._plan.batch
        yield from (range(at, min(at + step, count)) for at in range(0, count, step))

    def _cut(self, count: int, segments: int) -> list[list[memoryview]]:
        step = self._size // segments
        return [
            [buffer[at : at + step] for at in range(0, self._size, step)]
            for buffer in self._buffers[:count]
        ]

    def _delete(self) -> None:
        stored, self._stored = self._stored, []
        if not self._backend.capabilities.delete:
            self._left += len(stored)
            return
        for at in self._batches(len(stored)):
            self._backend.delete(stored[at.start : at.stop])

    def leave(self) -> list[str]:
        """Removes what an interrupted round left and returns notes on what stays."""
        try:
            self._delete()
        except L3Error as error:
            return [f"pages of {self._place} could not be removed: {error}"]
        if self._left:
            return [f"{self._left} pages stay in {self._place}: this store cannot delete"]
        return []
