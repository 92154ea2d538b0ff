"""What sglang's own metrics say of our pages: its collector takes what the adapter tells it."""

from __future__ import annotations

import host_pools
import pytest
from attached import attach, hashes, indices
from prometheus_client import REGISTRY
from sglang.srt.observability.metrics_collector import StorageMetricsCollector

CALLS = {"backup": [1, 6, 3], "prefetch": [6, 2]}
"""Pages of each call, by what sglang calls it."""


@pytest.fixture
def collector():
    """sglang's, which has its metrics in the registry of the process until the test ends."""
    before = set(REGISTRY._collector_to_names)
    yield StorageMetricsCollector({"tp_rank": "0"})
    for made in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(made)


def shown(name):
    return REGISTRY.get_sample_value(f"sglang:{name}", {"tp_rank": "0"})


def test_sglangs_collector_shows_the_pages_of_each_call(model, tmp_path, collector):
    pool = host_pools.mha()
    url = f"nvme://{tmp_path}/store?capacity=64MiB"
    rank = attach(url, model, pool, ranks={"enable_storage_metrics": True})
    try:
        for count in CALLS["backup"]:
            assert all(rank.batch_set_v1(hashes(count), indices(pool, range(count))))
        for count in CALLS["prefetch"]:
            assert all(rank.batch_get_v1(hashes(count), indices(pool, range(count))))
        for _ in range(2):  # what was told once is not told again
            collector.log_storage_metrics(rank.get_stats())
            for what, pages in CALLS.items():
                assert shown(f"{what}_pgs_sum") == sum(pages)
                assert shown(f"{what}_pgs_count") == shown(f"{what}_bandwidth_count") == len(pages)
                assert shown(f"{what}_bandwidth_sum") > 0
    finally:
        rank.close()


def test_pages_that_did_not_move_are_not_shown(model, collector):
    pool = host_pools.mha()
    rank = attach("memory://", model, pool, ranks={"enable_storage_metrics": True})
    try:
        assert rank.batch_get_v1(hashes(3), indices(pool, range(3))) == [False] * 3
        collector.log_storage_metrics(rank.get_stats())
    finally:
        rank.close()
    assert {shown(f"{what}_pgs_count") for what in CALLS} == {None}
