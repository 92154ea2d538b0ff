"""The conversation trace over a store that holds a tenth of it."""

from __future__ import annotations

import itertools

import pytest

from l3store import registry
from l3store.keys import FIRST_PAGE
from l3store.page import parse
from l3store.replay.engine import replay
from l3store.replay.traces import read_trace

PAGE = 65536
REQUESTS = 1000
DISTINCT = 21_514  # of the first thousand requests


@pytest.mark.parametrize("evict", ["sweep", "lru"])
def test_a_tenth_of_the_trace_bounds_order_and_bytes(tmp_path, real_trace, evict):
    """The files never exceed the capacity, no parent leaves before its child, nothing is wrong."""
    capacity = DISTINCT // 10 * PAGE
    url = f"nvme://{tmp_path}/s?capacity={capacity}&segment=4MiB&evict={evict}"
    with registry.open(url, raw=True) as store, real_trace.open(encoding="utf-8") as lines:
        largest, orphans = [], []

        def look(request):
            largest.append(sum(path.stat().st_size for path in (tmp_path / "s").glob("seg-*")))
            if request % 50 == 0:
                orphans.extend(_without_parent(store))

        counter = itertools.count()
        result = replay(
            store, itertools.islice(read_trace(lines), REQUESTS), page_bytes=PAGE,
            advance=lambda _: look(next(counter)),
        )  # fmt: skip
        assert max(largest) <= capacity
        assert max(largest) > capacity * 0.95, "the store did not even fill its capacity"
        assert orphans == []
        assert result.mismatched_pages == 0
        assert result.hit_pages > 0
        assert result.evicted_pages > DISTINCT // 2
        assert result.not_stored_pages == 0
        assert store.check_integrity() == []


def _without_parent(store):
    """Pages whose parent has left."""
    (place,) = {usage.place for usage in store.usage()}
    keys = list(store.scan(place))
    there = {key[-64:] for key in keys}
    parents = [parse(header).parent for header in store.headers(keys)]
    return [
        key
        for key, parent in zip(keys, parents, strict=True)
        if parent != FIRST_PAGE and parent.hex() not in there
    ]
