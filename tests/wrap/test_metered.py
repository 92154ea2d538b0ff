"""What goes through is counted: calls, outcomes, bytes, errors, times."""

from __future__ import annotations

import pytest

from l3store import metrics as m
from l3store.errors import BackendUnavailable
from l3store.wrap import Faulty, Metered


@pytest.fixture
def store(filled, metrics):
    return Metered(filled, name="m", metrics=metrics)


def test_pages_are_counted_by_outcome(store, filled, pages, metrics):
    filled.delete(pages.keys[6:])
    store.page_get(pages.keys, pages.room())
    store.page_set(pages.keys, pages.sealed())
    assert metrics.value(m.PAGES, "m", "page_get", "hit") == 6
    assert metrics.value(m.PAGES, "m", "page_get", "miss") == 2
    assert metrics.value(m.PAGES, "m", "page_set", "stored") == 8
    assert metrics.value(m.PAGES, "m", "page_set", "refused") == 0
    assert metrics.value(m.BYTES, "m", "page_get") == 6 * (128 + pages.size)


def test_behind_the_first_hole_nothing_was_asked_for(store, filled, pages, metrics):
    filled.delete(pages.keys[3:4])
    assert store.batch_exists(pages.keys) == 3
    assert metrics.value(m.PAGES, "m", "batch_exists", "hit") == 3
    assert metrics.value(m.PAGES, "m", "batch_exists", "miss") == 1
    store.exists_each(pages.keys)
    assert metrics.value(m.PAGES, "m", "exists_each", "hit") == 7


def test_calls_and_times_are_counted(store, pages, metrics):
    for _ in range(3):
        store.batch_exists(pages.keys)
    assert metrics.value(m.CALLS, "m", "batch_exists") == 3
    assert metrics.histogram(m.CALL_SECONDS, "m", "batch_exists").count == 3


def test_errors_are_counted_by_class_and_what_was_done_counts(filled, pages, metrics):
    seed = next(s for s in range(999) if [
        Faulty(filled, seed=s, partial=0.3).meets("partial", k) for k in pages.keys
    ][:3] == [False, False, True])  # fmt: skip
    store = Metered(Faulty(filled, seed=seed, partial=0.3), name="m", metrics=metrics)
    with pytest.raises(BackendUnavailable):
        store.page_get(pages.keys, pages.room())
    assert metrics.value(m.ERRORS, "m", "page_get", "BackendUnavailable") == 1
    assert metrics.value(m.PAGES, "m", "page_get", "hit") == 2
    assert metrics.value(m.CALLS, "m", "page_get") == 1
