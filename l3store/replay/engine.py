"""Drives a store as one rank of an engine does: look up, read the hit prefix, store the rest."""

from __future__ import annotations

import hashlib
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from l3store import page
from l3store.errors import CapacityError, ConfigError
from l3store.keys import FIRST_PAGE, Chain, Descriptor, attach
from l3store.replay.payload import Payloads, aligned_buffer
from l3store.replay.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from l3store.abc import Backend
    from l3store.replay.traces import Request

__all__ = ["Percentiles", "ReplayResult", "page_hashes", "replay"]


class Percentiles(msgspec.Struct, frozen=True):
    """Wall time of calls, in milliseconds."""

    calls: int
    p50_ms: float
    p95_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: list[float]) -> Percentiles:
        """Returns the percentiles of a list of times (nearest rank), 0 where there are none."""
        ranked = sorted(seconds) or [0.0]
        p50, p95, p99 = (ranked[-(-len(ranked) * q // 100) - 1] for q in (50, 95, 99))
        return cls(len(seconds), p50 * 1e3, p95 * 1e3, p99 * 1e3)


class ReplayResult(msgspec.Struct, kw_only=True):
    """What a replay saw. Seconds are those inside calls of the store, and sealing."""

    requests: int = 0
    pages: int = 0
    hit_pages: int = 0
    """Pages read as parts of a stored prefix, right or wrong."""
    set_pages: int = 0
    """Pages stored."""
    evicted_pages: int = 0
    """Pages stored here and gone at the end, counted once for each time they were stored."""
    failed_pages: int = 0
    """Pages that `batch_exists` promised and `page_get` did not give; they were stored again."""
    not_stored_pages: int = 0
    """Pages the store did not take."""
    mismatched_pages: int = 0
    """Pages that were read as good and have a wrong byte."""
    hit_share: float = 0.0
    read_bytes: int = 0
    """Payload bytes."""
    written_bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of the whole process during `seconds`."""
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    """Sealing included."""
    seal_seconds: float = 0.0
    exists: Percentiles = Percentiles(0, 0.0, 0.0, 0.0)
    get: Percentiles = Percentiles(0, 0.0, 0.0, 0.0)
    set: Percentiles = Percentiles(0, 0.0, 0.0, 0.0)
    bad_lines: int = 0
    page_bytes: int = 0
    batch: int = 0
    url: str = ""


def page_hashes(seed: int, ids: Iterable[int]) -> tuple[bytes, ...]:
    """Returns the page hashes of block ids: SHA-256("l3store.replay.1" + seed + id), both i64."""
    start = hashlib.sha256(b"l3store.replay.1" + seed.to_bytes(8, "little", signed=True))
    hashes = []
    for block in ids:
        state = start.copy()
        state.update(block.to_bytes(8, "little", signed=True))
        hashes.append(state.digest())
    return tuple(hashes)


def replay(
    backend: Backend,
    requests: Iterable[Request],
    *,
    page_bytes: int,
    batch: int = 128,
    seed: int = 0,
    tag: str = "",
    advance: Callable[[int], None] = lambda _: None,
) -> ReplayResult:
    """Replays `requests` over `backend` and checks every byte read, outside the timed parts.

    Blocks until the last request. Memory: ``batch + 4`` pages, and some 100 bytes for each page
    stored.

    Args:
        backend: An open store; it is not closed.
        requests: Such as `read_trace` yields.
        page_bytes: Payload bytes of a page.
        batch: Pages a call, at most; fewer where the backend takes fewer.
        seed: Another seed means other pages; an i64.
        tag: Keeps replays in one store apart: part of the namespace.
        advance: Called with 1 after each request.

    Raises:
        ConfigError: The store holds another descriptor under this namespace, pages are too large
            for it, or a batch does not fit in memory.
        BackendUnavailable, BackendTimeout: The store does not answer.
    """
    largest = backend.capabilities.max_page_bytes - page.HEADER_BYTES
    if page_bytes > largest:
        raise ConfigError(
            f"pages of {page_bytes} bytes are too large for this store; the largest is {largest}"
        )
    descriptor = Descriptor(
        model="replay", dtype="opaque", page_size=BLOCK_TOKENS, pool="kv", pool_class="replay",
        layers=1, heads=1, dims=(page_bytes,), page_bytes=page_bytes, byte_order="opaque",
        tag=f"{tag}{seed}",
    )  # fmt: skip
    batch = min(batch, backend.capabilities.max_batch)
    rank = _Rank(backend, f"{attach(backend, descriptor)}/kv/all", page_bytes, batch, seed)
    for request in requests:
        rank.serve(Chain(page_hashes(seed, request.hash_ids), FIRST_PAGE, 0))
        advance(1)
    return rank.result()


@dataclass(slots=True)
class _Timer:
    wall: float = 0.0
    cpu: float = 0.0
    each: list[float] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - wall
            self.cpu += time.process_time() - cpu
            self.wall += took
            self.each.append(took)


class _Rank:
    def __init__(
        self, backend: Backend, place: str, page_bytes: int, batch: int, seed: int
    ) -> None:
        self._backend, self._place = backend, place
        self._page_bytes, self._batch = page_bytes, batch
        try:
            self._payloads = Payloads(page_bytes, seed)
            self._buffers = aligned_buffer(batch, page_bytes)
        except (MemoryError, OverflowError, OSError) as error:
            raise ConfigError(
                f"{batch} pages of {page_bytes} bytes do not fit in memory; "
                "choose smaller pages or fewer a call"
            ) from error
        self._exists, self._get = _Timer(), _Timer()
        self._seal, self._set = _Timer(), _Timer()
        self._stored: set[bytes] = set()
        self._seen = ReplayResult()

    def serve(self, chain: Chain) -> None:
        """One request."""
        seen, keys = self._seen, chain.keys(self._place)
        hit = self._find(keys)
        seen.requests += 1
        seen.pages += len(keys)
        missing = [
            at for start in range(0, hit, self._batch)
            for at in self._read(chain, keys, range(start, min(start + self._batch, hit)))
        ]  # fmt: skip
        seen.failed_pages += len(missing)
        for at in missing:  # evicted since it was promised: alone, as its neighbours are stored
            self._write(chain[at : at + 1], keys[at : at + 1])
        for start in range(hit, len(keys), self._batch):
            part = slice(start, start + self._batch)
            self._write(chain[part], keys[part])

    def _find(self, keys: list[str]) -> int:
        """Returns how long the stored prefix is; asks no further than the batch with its end."""
        hit = 0
        for start in range(0, len(keys), self._batch):
            asked = keys[start : start + self._batch]
            with self._exists.running():
                found = self._backend.batch_exists(asked)
            hit += found
            if found < len(asked):
                break
        return hit

    def _read(self, chain: Chain, keys: list[str], part: range) -> list[int]:
        """Reads and checks a batch of the hit prefix; returns the pages that did not come."""
        buffers = self._buffers[: len(part)]
        for buffer in buffers:
            self._payloads.poison(buffer)
        into = page.frame([(buffer,) for buffer in buffers])
        with self._get.running():
            done = self._backend.page_get(keys[part.start : part.stop], into)
        for at, good, buffer in zip(part, done, buffers, strict=True):
            if good:
                self._seen.hit_pages += 1
                self._seen.read_bytes += self._page_bytes
                if not self._payloads.matches(chain.hashes[at], buffer):
                    self._seen.mismatched_pages += 1
        return [at for at, good in zip(part, done, strict=True) if not good]

    def _write(self, chain: Chain, keys: list[str]) -> None:
        buffers = self._buffers[: len(chain)]
        for value, buffer in zip(chain.hashes, buffers, strict=True):
            self._payloads.write(value, buffer)
        with self._seal.running():
            pages = page.seal(self._place, chain, [(buffer,) for buffer in buffers])
        try:
            with self._set.running():
                done = self._backend.page_set(keys, pages)
        except CapacityError as error:
            done = error.done
        stored = [value for value, good in zip(chain.hashes, done, strict=True) if good]
        self._stored.update(stored)
        self._seen.set_pages += len(stored)
        self._seen.written_bytes += len(stored) * self._page_bytes
        self._seen.not_stored_pages += len(done) - len(stored)

    def result(self) -> ReplayResult:
        """Everything counted and timed."""
        seen = self._seen
        left = Chain(tuple(self._stored)).keys(self._place)
        step = min(1024, self._backend.capabilities.max_batch)
        present = sum(
            sum(self._backend.exists_each(left[at : at + step])) for at in range(0, len(left), step)
        )
        seen.evicted_pages = seen.set_pages - present
        seen.hit_share = seen.hit_pages / seen.pages if seen.pages else 0.0
        timers = (self._exists, self._get, self._seal, self._set)
        seen.seconds = sum(timer.wall for timer in timers)
        seen.cpu_seconds = sum(timer.cpu for timer in timers)
        seen.read_seconds, seen.seal_seconds = self._get.wall, self._seal.wall
        seen.write_seconds = self._set.wall + self._seal.wall
        seen.exists = Percentiles.of(self._exists.each)
        seen.get, seen.set = Percentiles.of(self._get.each), Percentiles.of(self._set.each)
        seen.page_bytes, seen.batch = self._page_bytes, self._batch
        return seen
