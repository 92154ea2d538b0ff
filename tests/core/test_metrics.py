"""Counters, histograms, their Prometheus form and their table."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Thread

from prometheus_client import CollectorRegistry, generate_latest

from l3store import metrics as m

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_counters_add_up_over_threads():
    metrics = m.Metrics()

    def add():
        for _ in range(5000):
            metrics.add((m.CALLS, ("memory", "page_get"), 1), (m.BYTES, ("memory", "page_get"), 3))

    threads = [Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.value(m.CALLS, "memory", "page_get") == 20_000
    assert metrics.value(m.BYTES, "memory", "page_get") == 60_000


def test_prometheus_reads_the_same_numbers():
    metrics = m.Metrics()
    metrics.add((m.REFUSED, ("file", "payload"), 2))
    for seconds in (0.00005, 0.002, 99.0):
        metrics.observe(m.CALL_SECONDS, ("file", "page_get"), seconds)
    registry = CollectorRegistry()
    registry.register(metrics.collector())
    text = generate_latest(registry).decode()
    assert 'l3store_refused_pages_total{backend="file",reason="payload"} 2.0' in text
    assert re.search(r'l3store_call_seconds_bucket\{.*le="0.0001".*\} 1.0', text)
    assert re.search(r'l3store_call_seconds_bucket\{.*le="30.0".*\} 2.0', text)
    assert re.search(r'l3store_call_seconds_bucket\{.*le="\+Inf".*\} 3.0', text)
    assert 'l3store_call_seconds_count{backend="file",op="page_get"} 3.0' in text


def test_the_table_in_the_documentation_is_made_from_the_code():
    assert m.markdown_table() in DOCS.read_text(encoding="utf-8")


def test_every_metric_is_listed():
    declared = {value for value in vars(m).values() if isinstance(value, m.Metric)}
    assert declared == set(m.DEFINITIONS)
