"""What leaves a full nvme store, and how its pages lie then: ``python bench/eviction.py [--json]``.

Replays the conversation trace against policy and free space alone, as the store and the replay
drive them, without I/O: the prefix that is there is used, the rest is stored, and pages leave for
it. Needs the trace beside the checkout, or in the folder that L3STORE_TRACE_DIR names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from time import thread_time_ns
from typing import TYPE_CHECKING, Any

from l3store.backends.nvme.eviction import NONE, POLICIES, Policy
from l3store.backends.nvme.format import Geometry
from l3store.backends.nvme.options import NvmeOptions, sizes
from l3store.backends.nvme.space import Space
from l3store.config import Size
from l3store.replay import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

BATCH = 128
SHARES = (0.02, 0.10, 0.30)
PAGE_BYTES = (64 << 10, 128 << 10)
TURNOVERS = 3  # of the capacity, after which a store is old
LEAST_BYTES = 1 << 30  # of a capacity whose runs are counted: its segments are like real ones


class PlainLRU(Policy):
    """The page that was used longest ago, whatever follows it: what leaf first is measured by."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def added(
        self, slots: Sequence[int], parents: Sequence[int], ages: Sequence[float] = ()
    ) -> None:
        del parents
        self._order.update(dict.fromkeys(slots))

    def used(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._order.move_to_end(slot)

    def removed(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._order.pop(slot, None)

    def evict(self, count: int, busy: Container[int]) -> list[int]:
        chosen: list[int] = []
        for slot in self._order:
            if len(chosen) == count:
                break
            if slot not in busy:
                chosen.append(slot)
        self.removed(chosen)
        return chosen

    def __len__(self) -> int:
        return len(self._order)


class Cost:
    """Nanoseconds a page of one operation: CPU time, that of the clock's own call included."""

    def __init__(self) -> None:
        self.ns = self.pages = 0

    def add(self, since: int, pages: int) -> None:
        self.ns += thread_time_ns() - since
        self.pages += pages

    @property
    def each(self) -> int:
        return round(self.ns / self.pages) if self.pages else 0


class Runs:
    """Lengths of runs of neighbouring slots; a batch is sorted and merged, as the store does."""

    def __init__(self) -> None:
        self.pages = self.runs = 0

    def add(self, slots: Iterable[int]) -> None:
        before = None
        for slot in sorted(slots):
            self.pages += 1
            self.runs += before is None or slot != before + 1
            before = slot

    @property
    def mean(self) -> float:
        return self.pages / self.runs if self.runs else 0.0


class Store:
    """One place: which block is in which slot. `capacity` None: nothing ever leaves."""

    def __init__(self, policy: Policy, page_bytes: int, capacity: int | None) -> None:
        self.policy, self.space = policy, Space()
        if capacity is None:
            self.segments, self.slots = 1, 1 << 20
        else:
            size = sizes(NvmeOptions(capacity=Size(capacity)))
            self.segments = size["segments"]
            self.slots = Geometry(size["segment_bytes"], page_bytes).slots
        self.pages = self.segments * self.slots
        self.slot: dict[int, int] = {}
        self.fresh: dict[int, int] = {}  # where it lies in a store that never was full
        self.costs = {name: Cost() for name in ("added", "used", "evict", "space")}
        self.stored = self.hits = self.asked = self.lost = 0
        self.read, self.written = Runs(), Runs()  # since the store is old
        self.requests: list[list[int]] = []
        self._block: dict[int, int] = {}
        self._made = self._line = 0
        self._ends = capacity is not None

    @property
    def old(self) -> bool:
        """Whether runs are counted now: without an end a store never is old, so always."""
        return not self._ends or self.stored >= TURNOVERS * self.pages

    def serve(self, ids: list[int]) -> None:
        """One request: what the replay asks of a store."""
        self.requests.append(ids)
        self.asked += len(ids)
        hit = next((at for at, block in enumerate(ids) if block not in self.slot), len(ids))
        self.hits += hit
        self.lost += sum(block in self.slot for block in ids[hit:])
        found = [self.slot[block] for block in ids[:hit]]
        for _ in ("exists", "get"):
            since = thread_time_ns()
            self.policy.used(found)
            self.costs["used"].add(since, hit)
        if self.old:
            for at in range(0, hit, BATCH):
                self.read.add(found[at : at + BATCH])
        for at in range(hit, len(ids), BATCH):
            self.store(ids[at : at + BATCH], ids[:at])

    def store(self, blocks: Sequence[int], before: Sequence[int]) -> None:
        """Stores those blocks that are missing; what is `before` them in their chain stays."""
        keep = {self.slot[block] for block in (*before, *blocks) if block in self.slot}
        missing = [block for block in blocks if block not in self.slot]
        self._make_room(len(missing), keep)
        since = thread_time_ns()
        taken = self.space.take(len(missing))
        self.costs["space"].add(since, 0)
        slots = [first + i for first, count in taken for i in range(count)]
        self.stored += len(slots)
        if self.old:
            self.written.add(slots)
        for block, slot in zip(missing, slots, strict=False):
            self.slot[block], self._block[slot] = slot, block
            self.fresh[block] = self._line
            self._line += 1
        line = (*before[-1:], *blocks)
        above = dict(zip(line[1:], line, strict=False))
        parents = [self.slot.get(above.get(block, NONE), NONE) for block in missing[: len(slots)]]
        since = thread_time_ns()
        self.policy.added(slots, parents)
        self.costs["added"].add(since, len(slots))

    def _make_room(self, count: int, keep: set[int]) -> None:
        while self.space.free < count and self._made < self.segments:
            first = self._made * (self.slots + 1)
            self.space.give(range(first, first + self.slots))
            self._made += 1
        if (more := count - self.space.free) > 0:
            since = thread_time_ns()
            gone = self.policy.evict(more, keep)
            self.costs["evict"].add(since, len(gone))
            for slot in gone:
                del self.slot[self._block.pop(slot)]
            since = thread_time_ns()
            self.space.give(sorted(gone))
            self.costs["space"].add(since, len(gone))

    def kept(self) -> list[list[int]]:
        """Returns batches of the prefixes that are there, each page once, the newest first."""
        taken: set[int] = set()
        line: list[int] = []
        for ids in reversed(self.requests):
            hit = next((at for at, block in enumerate(ids) if block not in self.slot), len(ids))
            line += [block for block in ids[:hit] if block not in taken]
            taken.update(ids[:hit])
        return [line[at : at + BATCH] for at in range(0, len(line) - BATCH + 1, BATCH)]


def replay(make: Callable[[], Policy], page_bytes: int, capacity: int | None) -> dict[str, Any]:
    """Replays the whole trace; returns the figures of one line."""
    store = Store(make(), page_bytes, capacity)
    runs = {name: Runs() for name in ("kept", "kept, fresh", "new")}
    for ids in trace():
        before = store.old
        store.serve(ids)
        if store.old and not before:
            for batch in store.kept():
                runs["kept"].add(store.slot[block] for block in batch)
                runs["kept, fresh"].add(store.fresh[block] for block in batch)
    runs["read"], runs["written"] = store.read, store.written
    if store.old and capacity:
        for at in range(40):  # chains of a whole batch, which the trace does not have
            blocks = range(1 << 40 | at << 10, (1 << 40 | at << 10) + BATCH)
            store.store(blocks, ())
            runs["new"].add(store.slot[block] for block in blocks)
    counted = capacity is None or capacity >= LEAST_BYTES
    return {
        "capacity_pages": store.pages if capacity else None,
        "segment_slots": store.slots if capacity else None,
        "hit_share": store.hits / store.asked,
        "pages_behind_holes": store.lost,
        "turnovers": store.stored / store.pages,
        "ns_a_page": {name: cost.each for name, cost in store.costs.items()},
        "mean_run_pages": {name: one.mean for name, one in runs.items() if counted},
    }


def memory(make: Callable[[], Policy], pages: int = 100_000, length: int = 16) -> float:
    """Returns the bytes a page that a policy holds, with chains of `length` pages."""
    slots = list(range(pages))
    tracemalloc.start()
    policy = make()
    for at in range(0, pages, length):
        part = slots[at : at + length]
        policy.added(part, [NONE, *part[:-1]])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(policy)


def of_a_batch(make: Callable[[], Policy], pages: int = 65_536) -> dict[str, int]:
    """Returns the nanoseconds a page of calls of a whole batch, over a place of `pages`."""
    policy, costs = make(), {name: Cost() for name in ("added", "used", "evict")}
    for at in range(0, pages, BATCH):
        part = range(at, at + BATCH)
        since = thread_time_ns()
        policy.added(part, [NONE, *part[:-1]])
        costs["added"].add(since, BATCH)
    for at in range(0, pages, BATCH):
        since = thread_time_ns()
        policy.used(range(at, at + BATCH))
        costs["used"].add(since, BATCH)
    while len(policy) > pages // 2:
        since = thread_time_ns()
        gone = policy.evict(BATCH, ())
        costs["evict"].add(since, len(gone))
    return {name: cost.each for name, cost in costs.items()}


def trace() -> Iterator[list[int]]:
    """Yields the blocks of each request."""
    beside = Path(__file__).resolve().parents[1].parent / "shared" / "traces"
    path = Path(os.environ.get("L3STORE_TRACE_DIR", beside)) / "mooncake_conversation.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path.name} is not in {path.parent}: set L3STORE_TRACE_DIR")
    with open(path, "rb") as lines:
        for request in read_trace(lines):
            yield request.hash_ids


def main() -> None:
    """Prints the tables, or one JSON object."""
    parser = argparse.ArgumentParser(description="Eviction on the conversation trace, no I/O.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    as_json = parser.parse_args().json
    distinct = len({block for ids in trace() for block in ids})
    policies: dict[str, Callable[[], Policy]] = {"plain-lru": PlainLRU, **POLICIES}
    rows, alone = [], {}
    for name, make in policies.items():
        alone[name] = {"bytes_a_page": memory(make), "ns_a_page_of_a_batch": of_a_batch(make)}
        if not as_json:
            ns = alone[name]["ns_a_page_of_a_batch"]
            print(
                f"{name:<10} {alone[name]['bytes_a_page']:.1f} bytes a page; {BATCH} a call: {ns}"
            )
    for page_bytes in PAGE_BYTES:
        for share in (*SHARES, None):
            capacity = int(distinct * share) * page_bytes if share else None
            for name in policies if share else ["lru"]:
                row = {"page_bytes": page_bytes, "share": share, "policy": name}
                row |= replay(policies[name], page_bytes, capacity)
                rows.append(row)
                if not as_json:
                    _print(row, first=len(rows) == 1)
    if as_json:
        json.dump({"distinct_pages": distinct, "policies": alone, "rows": rows}, sys.stdout)
        print()


_RUNS = ("read", "written", "new", "kept", "kept, fresh")


def _print(row: dict[str, Any], *, first: bool) -> None:
    if first:
        print(
            f"\n{'':<24}hit holes     ns a page:  added  used evict space"
            f"     mean run, pages:  {'  '.join(_RUNS)}"
        )
    ns, runs, share = row["ns_a_page"], row["mean_run_pages"], row["share"]
    lengths = "".join(f"{runs[name]:>8.1f}" if runs.get(name) else f"{'-':>8}" for name in _RUNS)
    print(
        f"{row['page_bytes'] >> 10:>3} K{f'{share:.0%}' if share else 'no end':>7}"
        f" {row['policy']:<10}{row['hit_share']:>7.2%}{row['pages_behind_holes']:>6}{'':16}"
        f"{ns['added']:>5}{ns['used']:>6}{ns['evict']:>6}{ns['space']:>6}{'':16}{lengths}",
        flush=True,
    )


if __name__ == "__main__":
    main()
