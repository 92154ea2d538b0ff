"""What is measured, and what comes out of it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Literal

import msgspec

from l3store.errors import ConfigError, nearest

if TYPE_CHECKING:
    from l3store.abc import Capabilities
    from l3store.bench.medium import Medium

__all__ = ["OPS", "BenchResult", "Plan", "Row", "check_plan"]

OPS = ("set", "get", "exists")
_SPARE_BYTES = 256 << 20  # of a disk or of memory, that stay free
_KEPT_BYTES = 2 << 30  # that a run may leave behind where it cannot delete
_HEADER = 128


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: each page size with each number of segments."""

    ops: tuple[str, ...] = OPS
    page_bytes: tuple[int, ...] = (64 << 10, 128 << 10, 1 << 20)
    """Payload bytes of a page."""
    segments: tuple[int, ...] = (1, 2, 64)
    """Pieces in which a page's payload lies in host memory, all of one size."""
    batch: int = 128
    """Pages a call."""
    rounds: int = 3
    """Each round stores fresh pages."""
    cache: Literal["cold", "warm", "any"] = "any"
    """State of the page cache before each round's reads."""
    working_set: int = 1 << 30
    """Payload bytes in the store at one time."""
    shuffle: bool = False
    """Read in another order than written."""
    seed: int = 0

    def pages(self, page_bytes: int) -> int:
        """Returns the pages a round, a multiple of the batch."""
        return self.working_set // (page_bytes * self.batch) * self.batch


class Row(msgspec.Struct, kw_only=True):
    """One operation at one page size and number of segments. GB are 10**9 bytes of payload.

    Rates are medians over the rounds, percentiles go over the batches of all rounds.
    """

    op: str
    page_bytes: int
    segments: int
    batch: int
    pages: int
    """Pages a round."""
    gb_s: float | None
    """None for exists, which moves no payload."""
    gb_s_lowest: float | None
    gb_s_highest: float | None
    memcpy_gb_s: float | None
    of_memcpy: float | None
    """Median of each round's ratio: memcpy seconds to seconds of the store, same bytes."""
    pages_s: float
    cpu_s_gb: float | None
    """CPU seconds of this process, all threads, a GB."""
    p50_ms: float
    p95_ms: float
    p99_ms: float
    device_bytes: int | None
    """Moved between memory and device during the timed part of all rounds; None: not known."""
    cache: str
    """What `device_bytes` proves: cold, warm, mixed; ram, remote; for set: page cache, device."""
    missed_pages: int
    mismatched_pages: int


class BenchResult(msgspec.Struct, kw_only=True):
    """Everything a run saw."""

    url: str
    verify: bool
    """Whether pages were checked by their checksums inside the timed part."""
    stack: str
    """The wrappers in the timed part."""
    cache_asked: str
    rounds: int
    working_set: int
    order: str
    seed: int
    warm_up: str
    ruler: str
    rows: list[Row]
    notes: list[str]
    """What a reader of the figures must know, such as "not cold"."""

    @property
    def mismatched_pages(self) -> int:
        """Pages that were read as good and have a wrong byte."""
        return sum(row.mismatched_pages for row in self.rows)


def check_plan(plan: Plan, able: Capabilities, medium: Medium, pools: int) -> None:
    """Accepts a plan for a store, before anything is written.

    Args:
        plan: What to measure.
        able: The store's.
        medium: Where its bytes lie.
        pools: Bytes of memory that the run needs besides.

    Raises:
        ConfigError: A size is impossible, or there is no room; names the nearest valid choice.
    """
    for op in plan.ops:
        if op not in OPS:
            raise ConfigError(f"unknown operation {op!r}{nearest(op, OPS)}")
    if plan.batch < 1 or plan.batch > able.max_batch:
        raise ConfigError(f"batch {plan.batch} is not possible; this store takes 1 to "
                          f"{able.max_batch} pages a call")  # fmt: skip
    for size in plan.page_bytes:
        if size + _HEADER > able.max_page_bytes:
            raise ConfigError(
                f"pages of {size} bytes are too large for this store; the largest is "
                f"{able.max_page_bytes - _HEADER}"
            )
        for count in plan.segments:
            if count < 1 or size % count:
                raise ConfigError(
                    f"{size} bytes cannot be cut into {count} equal segments; the nearest number "
                    f"that can is {_nearest_divisor(size, count)}"
                )
        if not plan.pages(size):
            fits = plan.working_set // size
            raise ConfigError(
                f"a batch of {plan.batch} pages of {size} bytes is more than the working set of "
                f"{plan.working_set} bytes; "
                + (f"the largest batch is {fits}, or " if fits else "")
                + f"the least working set is {plan.batch * size}"
            )
    # A store that cannot delete keeps the pages of every round.
    times = 1 if able.delete else plan.rounds * len(plan.page_bytes) * len(plan.segments)
    if plan.working_set * times > _KEPT_BYTES and times > 1:
        raise ConfigError(
            f"this store cannot delete, and {plan.working_set * times} bytes would stay in it; "
            f"the largest working set for these sizes and rounds is {_KEPT_BYTES // times}, "
            "such as --working-set 64MiB"
        )
    _check_room(plan, medium, pools, times)


def _check_room(plan: Plan, medium: Medium, pools: int, times: int) -> None:
    least = max(plan.page_bytes) * plan.batch
    headers = max(plan.pages(size) for size in plan.page_bytes) * _HEADER
    needed = (plan.working_set + headers) * times
    memory = _available_memory()
    in_memory = pools + (needed if medium.kind == "ram" else 0)
    if memory is not None and in_memory + _SPARE_BYTES > memory:
        raise ConfigError(
            f"the run needs {in_memory} bytes of memory, of which {memory} are free; "
            f"the least working set for this batch and page size is {least}"
        )
    if medium.path:
        free = shutil.disk_usage(medium.path).free
        if needed + _SPARE_BYTES > free:
            largest = max((free - _SPARE_BYTES) // times - headers, 0)
            raise ConfigError(
                f"{medium.path} has {free} bytes free; a working set of {plan.working_set} does "
                f"not fit, the largest that does is {largest}"
            )


def _nearest_divisor(size: int, count: int) -> int:
    reach = range(1, min(size, max(2 * count, 64)) + 1)
    return min((one for one in reach if size % one == 0), key=lambda one: abs(one - count))


def _available_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                name, _, rest = line.partition(":")
                if name == "MemAvailable":
                    return int(rest.split()[0]) * 1024
    except OSError:
        pass  # no such file here: the system itself will refuse
    return None
