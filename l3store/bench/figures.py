"""From seconds and bytes to the figures of a row, and what must be said beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from l3store.bench.medium import cold_or_warm
from l3store.bench.plan import Row
from l3store.replay.engine import Percentiles

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Round", "Timer", "row_of", "warnings"]


@dataclass(slots=True)
class Round:
    """Sums over the calls of one round."""

    wall: float = 0.0
    cpu: float = 0.0
    ruler: float = 0.0
    """Seconds of memcpy for the same bytes."""
    device: int | None = 0
    """Bytes that the device moved; None: not known."""


@dataclass(slots=True)
class Timer:
    """One operation of one row."""

    rounds: list[Round] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    """Seconds of each call."""
    missed: int = 0
    mismatched: int = 0

    def add_device(self, moved: int | None) -> None:
        """Adds to the last round."""
        now = self.rounds[-1]
        now.device = None if moved is None or now.device is None else now.device + moved


def row_of(
    op: str, timer: Timer, page_bytes: int, segments: int, batch: int, pages: int, medium: str
) -> Row:
    """Returns the figures of one operation.

    Args:
        op: The operation.
        timer: What was seen of it, one entry a round.
        page_bytes: Payload bytes of a page.
        segments: Pieces of a page.
        batch: Pages a call.
        pages: Pages a round.
        medium: `Medium.kind` of the store.
    """
    rounds, payload = timer.rounds, pages * page_bytes
    device = [one.device for one in rounds]
    moved = None if None in device else sum(one or 0 for one in device)
    rates = [payload / one.wall / 1e9 for one in rounds]
    times = Percentiles.of(timer.each)
    row = Row(
        op=op, page_bytes=page_bytes, segments=segments, batch=batch, pages=pages,
        gb_s=median(rates), gb_s_lowest=min(rates), gb_s_highest=max(rates),
        memcpy_gb_s=None, of_memcpy=None,
        pages_s=median(pages / one.wall for one in rounds),
        cpu_s_gb=median(one.cpu for one in rounds) / payload * 1e9,
        p50_ms=times.p50_ms, p95_ms=times.p95_ms, p99_ms=times.p99_ms,
        device_bytes=moved, cache=_cache(op, medium, moved, payload * len(rounds)),
        missed_pages=timer.missed, mismatched_pages=timer.mismatched,
    )  # fmt: skip
    if op == "exists":
        row.gb_s = row.gb_s_lowest = row.gb_s_highest = row.cpu_s_gb = None
    else:
        row.memcpy_gb_s = median(payload / one.ruler / 1e9 for one in rounds)
        row.of_memcpy = median(one.ruler / one.wall for one in rounds)
    return row


def _cache(op: str, medium: str, moved: int | None, payload: int) -> str:
    if medium != "disk":
        return medium
    if op == "exists":
        return "-"
    if op == "get":
        return cold_or_warm(moved, payload)
    return "unknown" if moved is None else "device" if moved >= payload else "page cache"


def warnings(rows: Sequence[Row], asked: str) -> list[str]:
    """Returns what contradicts a reader's belief: another cache state, missing or wrong pages."""
    found = []
    for row in rows:
        what = f"{row.op} of {row.page_bytes} bytes in {row.segments} segments"
        if row.op == "get" and asked != "any" and row.cache != asked:
            came = "an unknown number of" if row.device_bytes is None else row.device_bytes
            found.append(
                f"NOT {asked.upper()}: {what} was {row.cache}: {came} bytes came from the device"
            )
        if row.missed_pages:
            found.append(f"MISSED: {what}: {row.missed_pages} pages were refused or not found")
        if row.mismatched_pages:
            found.append(f"WRONG BYTES: {what}: {row.mismatched_pages} pages")
    return found
