"""Counters and histograms: what every store counts, and how Prometheus reads it.

`DEFINITIONS` is the one list; the table in docs/metrics.md is made from it (`markdown_table`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["DEFINITIONS", "METRICS", "Histogram", "Metric", "Metrics", "markdown_table"]

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Bucket bounds of call times, in seconds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing that is counted."""

    name: str
    kind: Literal["counter", "histogram"]
    help: str
    labels: tuple[str, ...]


CALLS = Metric(
    "l3store_calls_total", "counter", "Calls of the backend contract.", ("backend", "op")
)
CALL_SECONDS = Metric(
    "l3store_call_seconds", "histogram", "Wall time of one call.", ("backend", "op")
)
ERRORS = Metric(
    "l3store_errors_total", "counter", "Calls that raised, by error class.",
    ("backend", "op", "error"),
)  # fmt: skip
PAGES = Metric(
    "l3store_pages_total", "counter",
    "Pages asked for, by outcome: hit or miss (page_get, exists), stored or refused (page_set).",
    ("backend", "op", "outcome"),
)  # fmt: skip
BYTES = Metric(
    "l3store_bytes_total", "counter",
    "Bytes of pages read or stored with success, headers included.", ("backend", "op"),
)  # fmt: skip
REFUSED = Metric(
    "l3store_refused_pages_total", "counter",
    "Pages that were read and refused by their check, by reason; each is also a miss.",
    ("backend", "reason"),
)  # fmt: skip
OPENINGS = Metric(
    "l3store_breaker_openings_total", "counter", "Times the breaker opened.", ("backend",)
)
REJECTED = Metric(
    "l3store_breaker_rejected_total", "counter", "Calls refused by an open breaker.", ("backend",)
)
LATE = Metric(
    "l3store_late_calls_total", "counter",
    "Calls that were still running at their deadline.", ("backend",),
)  # fmt: skip
ENGINE_PAGES = Metric(
    "l3store_engine_pages_total", "counter",
    "Pages that an engine asked its adapter for, by outcome (docs/sglang.md says what each means).",
    ("engine", "pool", "op", "outcome"),
)  # fmt: skip

DEFINITIONS = (
    CALLS, CALL_SECONDS, ERRORS, PAGES, BYTES, REFUSED, OPENINGS, REJECTED, LATE, ENGINE_PAGES,
)  # fmt: skip


@dataclass(slots=True)
class Histogram:
    """Counts by bucket (the last one has no upper bound), and the sum of all values."""

    counts: list[int]
    total: float = 0.0

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


Series = tuple[Metric, tuple[str, ...]]


class Metrics:
    """A set of counters and histograms. Thread-safe; no call blocks but for its own lock."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counters: dict[Series, float] = {}
        self._histograms: dict[Series, Histogram] = {}

    def add(self, *increments: tuple[Metric, tuple[str, ...], float]) -> None:
        """Adds to counters, all at one time: (metric, label values, amount)."""
        with self._lock:
            for metric, labels, amount in increments:
                series = (metric, labels)
                self._counters[series] = self._counters.get(series, 0) + amount

    def observe(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Adds one value to a histogram."""
        series = (metric, labels)
        with self._lock:
            histogram = self._histograms.get(series)
            if histogram is None:
                histogram = self._histograms[series] = Histogram([0] * (len(SECONDS) + 1))
            histogram.counts[bisect_left(SECONDS, value)] += 1
            histogram.total += value

    def value(self, metric: Metric, *labels: str) -> float:
        """Returns a counter's value, 0 where nothing was counted."""
        with self._lock:
            return self._counters.get((metric, labels), 0)

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """Returns a copy of a histogram, empty where nothing was observed."""
        with self._lock:
            found = self._histograms.get((metric, labels))
            if found is None:
                return Histogram([0] * (len(SECONDS) + 1))
            return Histogram(list(found.counts), found.total)

    def counters(self) -> Mapping[Series, float]:
        """Returns a copy of all counters."""
        with self._lock:
            return dict(self._counters)

    def collector(self) -> Any:
        """Returns a collector for ``prometheus_client.REGISTRY.register`` (extra ``metrics``).

        Raises:
            ModuleNotFoundError: prometheus_client is not installed; the message names the extra.
        """
        try:
            from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
            from prometheus_client.registry import Collector
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Prometheus exposition needs prometheus_client: pip install 'l3store[metrics]'"
            ) from error
        metrics = self

        class _Collector(Collector):
            def collect(self) -> Iterator[Any]:
                for metric in DEFINITIONS:
                    labels = metric.labels
                    if metric.kind == "counter":
                        counter = CounterMetricFamily(metric.name, metric.help, labels=labels)
                        for values, total in metrics._of(metric, metrics._counters):
                            counter.add_metric(values, total)
                        yield counter
                    else:
                        timed = HistogramMetricFamily(metric.name, metric.help, labels=labels)
                        for values, found in metrics._of(metric, metrics._histograms):
                            timed.add_metric(values, _cumulative(found), found.total)
                        yield timed

        return _Collector()

    def _of(self, metric: Metric, table: Mapping[Series, Any]) -> list[tuple[Sequence[str], Any]]:
        with self._lock:
            return [(labels, value) for (kind, labels), value in table.items() if kind == metric]


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    running, buckets = 0, []
    for bound, count in zip((*SECONDS, "+Inf"), histogram.counts, strict=True):
        running += count
        buckets.append((str(bound), float(running)))
    return buckets


def markdown_table() -> str:
    """Returns the table of all metrics for the documentation."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |"
        for metric in DEFINITIONS
    ]
    return "\n".join(("| metric | kind | labels | what it counts |", "|---|---|---|---|", *rows))


METRICS = Metrics()
"""The process's own set, used wherever none is given."""
