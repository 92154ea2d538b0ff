"""Pages between host pools and the store. Nothing here raises: what goes wrong is a miss, counted.

Called from SGLang's query, read and write threads at once; each call blocks for the store, which
its deadline bounds. No call works on the caller's memory after it returned.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from l3store.adapters.sglang.pools import Copied, InPlace, bytes_of, cut_flat
from l3store.adapters.sglang.tally import reason_of
from l3store.errors import CapacityError, L3Error
from l3store.keys import Chain
from l3store.metrics import METRICS, REFUSED
from l3store.page import frame, opener, stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from l3store.abc import Backend, Segments
    from l3store.adapters.sglang.tally import Tally

__all__ = ["Pool", "Speed", "Traffic"]

_SPEEDS = 10_000  # kept for SGLang's metrics, should it never ask


@dataclass(frozen=True, slots=True)
class Pool:
    """One host pool and the names of its pages on this rank."""

    name: str
    places: list[str]
    """Of the objects that a page is: one, or with head groups one for each group of this rank."""
    pages: InPlace | Copied | None
    """None: a logical pool. Its pages have no bytes and no objects: they are always there."""

    @property
    def object_bytes(self) -> int:
        """Payload bytes of each object."""
        return 0 if self.pages is None else self.pages.object_bytes


class Speed(NamedTuple):
    """One call that moved pages."""

    pages: int
    gb_per_s: float
    """1e9 payload bytes a second."""


class Traffic:
    """Moves pages of any pool of one rank. Thread-safe.

    Args:
        store: Ready to use: verified, bounded by a deadline, behind a breaker.
        name: The label ``backend`` of what is counted.
        tally: Where outcomes go.
        why_off: Says why L3 is off, "" while it is on; asked at each call.
    """

    def __init__(self, store: Backend, name: str, tally: Tally, why_off: Callable[[], str]) -> None:
        self._store, self._name, self._tally, self._why_off = store, name, tally, why_off
        self.reads: deque[Speed] = deque(maxlen=_SPEEDS)
        self.writes: deque[Speed] = deque(maxlen=_SPEEDS)

    # -- queries -----------------------------------------------------------------------------

    def run(self, pool: Pool, hashes: Sequence[str]) -> int:
        """Returns the leading run of pages that is stored; 0 when the store cannot say."""
        if pool.pages is None or not hashes:
            return len(hashes)
        try:
            self._check_on()
            run = min(self._store.batch_exists(_keys(place, hashes)) for place in pool.places)
        except Exception as error:
            self._tally.add("exists", pool.name, {reason_of(error): len(hashes)}, error)
            return 0
        self._tally.add("exists", pool.name, {"present": run, "absent": int(run < len(hashes))})
        return run

    def each(self, pool: Pool, hashes: Sequence[str]) -> list[bool]:
        """Returns for each page whether it is stored; False when the store cannot say."""
        present = [True] * len(hashes)
        if pool.pages is None or not hashes:  # none to ask of when KV has none, or hangs
            return present
        try:
            self._check_on()
            for place in pool.places:
                found = self._store.exists_each(_keys(place, hashes))
                present = [a and b for a, b in zip(present, found, strict=True)]
        except Exception as error:
            self._tally.add("exists", pool.name, {reason_of(error): len(hashes)}, error)
            return [False] * len(hashes)
        there = sum(present)
        self._tally.add("exists", pool.name, {"present": there, "absent": len(hashes) - there})
        return present

    # -- pages of a host pool ------------------------------------------------------------------

    def read(
        self, pool: Pool, hashes: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[bool]:
        """Fills host pages from the store; host pages of a False hold no promise."""

        def move(pages: InPlace | Copied) -> list[bool]:
            numbers = pages.numbers(host_indices, len(hashes))
            _check_apart(numbers)
            if isinstance(pages, InPlace):
                return self._get(pool, hashes, _parts(pool, pages, numbers))
            flat = pages.blank(numbers)
            done = self._get(pool, hashes, [frame([(bytes_of(page),) for page in flat])])
            pages.put(numbers, flat, done)
            return done

        return self._guarded("get", pool, hashes, move)

    def write(
        self,
        pool: Pool,
        hashes: Sequence[str],
        host_indices: torch.Tensor | None,
        before: Sequence[str] | None,
    ) -> list[bool]:
        """Stores host pages. `before` are the hashes before them from the start, None: unknown."""

        def move(pages: InPlace | Copied) -> list[bool]:
            numbers = pages.numbers(host_indices, len(hashes))
            if isinstance(pages, InPlace):
                return self._set(pool, hashes, before, _parts(pool, pages, numbers))
            return self._set(pool, hashes, before, [frame(pages.taken(numbers))])

        return self._guarded("set", pool, hashes, move)

    # -- flat pages, in tensors of the caller's ------------------------------------------------

    def read_flat(
        self, pool: Pool, hashes: Sequence[str], into: Sequence[torch.Tensor]
    ) -> list[bool]:
        """Fills flat pages from the store, each a contiguous CPU tensor."""

        def move(pages: InPlace | Copied) -> list[bool]:
            if any(not tensor.is_contiguous() for tensor in into):
                raise ValueError("a page is read into contiguous tensors only")
            _check_apart([tensor.data_ptr() for tensor in into])
            return self._get(pool, hashes, _flat_parts(pool, pages, hashes, into))

        return self._guarded("get", pool, hashes, move)

    def write_flat(
        self, pool: Pool, hashes: Sequence[str], flat: Sequence[torch.Tensor]
    ) -> list[bool]:
        """Stores flat pages, consecutive ones of one chain."""
        return self._guarded(
            "set",
            pool,
            hashes,
            lambda pages: self._set(pool, hashes, None, _flat_parts(pool, pages, hashes, flat)),
        )

    def _guarded(
        self,
        op: str,
        pool: Pool,
        hashes: Sequence[str],
        move: Callable[[InPlace | Copied], list[bool]],
    ) -> list[bool]:
        if pool.pages is None or not hashes:
            return [True] * len(hashes)
        try:
            self._check_on()
            return move(pool.pages)
        except Exception as error:
            self._tally.add(op, pool.name, {reason_of(error): len(hashes)}, error)
            return [False] * len(hashes)

    # -- the store -----------------------------------------------------------------------------

    def _get(
        self, pool: Pool, hashes: Sequence[str], parts: Sequence[list[Segments]]
    ) -> list[bool]:
        keys = [key for place in pool.places for key in _keys(place, hashes)]
        check, problem = opener(keys), None
        began = time.perf_counter()
        try:
            done = self._store.page_get(keys, _flattened(parts), check)
        except L3Error as error:
            problem, done = error, error.done or [False] * len(keys)
        done = _pages(done, len(parts))
        good = sum(done)
        self._note(self.reads, pool, good, began)
        outcomes = {"read": good}
        if missing := len(done) - good:
            for reason, objects in check.reasons.items():
                METRICS.add((REFUSED, (self._name, reason), objects))
                n = min(objects, missing)  # with head groups a page is several objects
                outcome = "recycled" if reason in ("place", "hash") else "integrity"
                outcomes[outcome] = outcomes.get(outcome, 0) + n
                missing -= n
            outcomes[reason_of(problem) if problem else "absent"] = missing
        self._tally.add("get", pool.name, outcomes, problem or dict(check.reasons) or "")
        return done

    def _set(
        self,
        pool: Pool,
        hashes: Sequence[str],
        before: Sequence[str] | None,
        parts: Sequence[list[Segments]],
    ) -> list[bool]:
        if before is None:
            links = Chain.from_hex(hashes)
        else:
            parent = before[-1] if before else ""
            links = Chain.from_hex(hashes, parent=parent, depth=len(before))
        keys = [key for place in pool.places for key in _keys(place, hashes)]
        for place, pages in zip(pool.places, parts, strict=True):
            stamp(place, links, pages, length=pool.object_bytes)
        problem: L3Error | None = None
        began = time.perf_counter()
        try:
            done = self._store.page_set(keys, _flattened(parts))
        except L3Error as error:
            problem, done = error, error.done or [False] * len(keys)
        done = _pages(done, len(parts))
        good = sum(done)
        self._note(self.writes, pool, good, began)
        outcomes = {"stored": good}
        if good < len(done):
            if problem is None and self._store.capabilities.read_only:
                problem = L3Error("the store is read-only")
            elif problem is None:
                problem = CapacityError("the store has no room: its capacity, or its writers")
            outcomes[reason_of(problem)] = len(done) - good
        self._tally.add("set", pool.name, outcomes, problem or "")
        return done

    def _check_on(self) -> None:
        if why := self._why_off():
            raise L3Error(why)

    def _note(self, speeds: deque[Speed], pool: Pool, good: int, began: float) -> None:
        if good:
            size = pool.object_bytes * len(pool.places) * good
            speeds.append(Speed(good, size / (time.perf_counter() - began) / 1e9))


def _keys(place: str, hashes: Sequence[str]) -> list[str]:
    prefix = place + "/"
    return [prefix + value for value in hashes]


def _check_apart(memories: Sequence[int]) -> None:
    """Accepts the memory of each page of a read: two in one place would both be called good."""
    if len(set(memories)) != len(memories):
        raise ValueError("two pages are to be read into the same memory")


def _parts(pool: Pool, pages: InPlace, numbers: Sequence[int]) -> list[list[Segments]]:
    return [pages.framed(numbers, part) for part in range(len(pool.places))]


def _flat_parts(
    pool: Pool, pages: InPlace | Copied, hashes: Sequence[str], flat: Sequence[torch.Tensor]
) -> list[list[Segments]]:
    """Returns the objects of flat pages, part by part.

    Raises:
        ValueError: Not one page a hash, or a page of another length.
    """
    if len(flat) != len(hashes):
        raise ValueError(f"{len(hashes)} pages, but {len(flat)} tensors")
    groups = len(pool.places)
    expected = pages.object_bytes * groups
    views = [bytes_of(tensor) for tensor in flat]
    for view in views:
        if view.nbytes != expected:
            raise ValueError(
                f"a flat page of pool {pool.name!r} has {expected} bytes, not {view.nbytes}"
            )
    cut = [cut_flat(view, groups) for view in views]
    return [frame([objects[part] for objects in cut]) for part in range(groups)]


def _flattened(parts: Sequence[list[Segments]]) -> list[Segments]:
    return parts[0] if len(parts) == 1 else [*chain.from_iterable(parts)]


def _pages(done: list[bool], parts: int) -> list[bool]:
    """Returns which pages are good: those all of whose objects are."""
    if parts == 1:
        return done
    each = len(done) // parts
    return [all(done[i::each]) for i in range(each)]
