"""Outcomes of pages by reason: counted for metrics and SGLang, told in the log at a bounded rate.

| outcome | meaning |
|---|---|
| `read`, `stored` | done |
| `absent` | not in the store |
| `integrity` | came, but its check failed: damaged |
| `recycled` | the whole page of another key came: its place was filled anew meanwhile, or pages were swapped |
| `timeout` | the deadline passed |
| `unavailable` | the store does not answer, or its breaker is open |
| `full` | the store had no room |
| `refused` | the call itself was wrong, or came when L3 was off |
"""  # noqa: E501

from __future__ import annotations

import logging
import time
from collections import Counter
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING

from l3store.errors import BackendTimeout, BackendUnavailable, CapacityError
from l3store.metrics import ENGINE_PAGES, METRICS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Tally", "reason_of"]

_TROUBLE_INTERVAL = 10.0
_TROUBLE = ("integrity", "recycled", "timeout", "unavailable", "full", "refused")

_log = logging.getLogger("l3store.sglang")

_Counted = tuple[str, str, str]
"""Pool, operation, outcome."""


def reason_of(error: Exception) -> str:
    """Returns the outcome of pages whose call raised `error`."""
    if isinstance(error, BackendTimeout):
        return "timeout"
    if isinstance(error, BackendUnavailable):
        return "unavailable"
    if isinstance(error, CapacityError):
        return "full"
    return "refused"


class Tally:
    """Counts the outcomes of one rank. Thread-safe; does not block but for its own lock.

    Args:
        rank: How log lines call this rank.
        interval: Seconds between two summary lines, at least; troubles have 10 s of their own.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, rank: str, interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank, self._interval, self._clock = rank, interval, clock
        self._lock = Lock()
        self._totals: Counter[_Counted] = Counter()
        self._told: Counter[_Counted] = Counter()
        self._summary_at = clock() + interval
        self._trouble_at = clock()
        self._silent = 0

    def add(self, op: str, pool: str, outcomes: dict[str, int], why: object = "") -> None:
        """Counts pages by outcome, and tells of them when it is time.

        Args:
            op: ``get``, ``set`` or ``exists``.
            pool: The pool's name.
            outcomes: Outcome -> pages; zeros are nothing.
            why: For the log: what happened, where that is more than the outcome's name.
        """
        outcomes = {outcome: n for outcome, n in outcomes.items() if n}
        METRICS.add(
            *((ENGINE_PAGES, ("sglang", pool, op, outcome), n) for outcome, n in outcomes.items())
        )
        now = self._clock()
        with self._lock:
            for outcome, n in outcomes.items():
                self._totals[pool, op, outcome] += n
            trouble = [name for name in _TROUBLE if name in outcomes]
            tell = trouble and now >= self._trouble_at
            if tell:
                self._trouble_at = now + _TROUBLE_INTERVAL
                silent, self._silent = self._silent, 0
            elif trouble:
                self._silent += 1
            summary = None
            if now >= self._summary_at:
                summary = self._totals - self._told
                self._told = self._totals.copy()
                self._summary_at = now + self._interval
        if tell:
            said = ", ".join(f"{outcomes[name]} {name}" for name in trouble)
            more = f" ({silent} such calls before were not told)" if silent else ""
            _log.warning("%s: %s of pool %s: %s pages. %s%s", self._rank, op, pool, said, why, more)
        if summary:
            _log.info("%s: %s", self._rank, _told(summary))

    def outcomes(self) -> Counter[tuple[str, str]]:
        """Returns pages by (op, outcome), of all pools together."""
        found: Counter[tuple[str, str]] = Counter()
        with self._lock:
            for (_, op, outcome), n in self._totals.items():
                found[op, outcome] += n
        return found

    def close(self) -> None:
        """Tells what was counted since the last summary."""
        with self._lock:
            rest = self._totals - self._told
            self._told = self._totals.copy()
        if rest:
            _log.info("%s: %s", self._rank, _told(rest))


def _told(counts: Counter[_Counted]) -> str:
    pools = groupby(sorted(counts.items()), key=lambda counted: counted[0][0])
    return "; ".join(
        f"{pool}: " + ", ".join(f"{op} {outcome} {n}" for (_, op, outcome), n in found)
        for pool, found in pools
    )
