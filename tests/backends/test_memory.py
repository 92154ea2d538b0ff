"""Memory beyond the contract: what is evicted first."""

from __future__ import annotations

import pytest

from l3store.backends.memory import MemoryBackend, MemoryOptions
from l3store.config import Size
from l3store.errors import CapacityError
from l3store.testing.kit import Pages

PAGE = 128 + 512


def _store(pages):
    return MemoryBackend(MemoryOptions(capacity=Size(pages * PAGE)))


def _fill(store, pages, part=slice(None)):
    return store.page_set(pages.keys[part], pages.sealed()[part])


def test_a_chain_that_does_not_fit_keeps_its_start():
    with _store(5) as store:
        pages = Pages(count=8, size=512)
        assert _fill(store, pages) == [True] * 5 + [False] * 3
        assert store.batch_exists(pages.keys) == 5


def test_the_end_of_the_least_recent_chain_goes_first():
    with _store(8) as store:
        one, two, three = (Pages(count=4, size=512, seed=i) for i in range(3))
        _fill(store, one)
        _fill(store, two)
        store.page_get(one.keys, one.room().pages)
        _fill(store, three, slice(0, 2))
        assert [store.batch_exists(p.keys) for p in (one, two, three)] == [4, 2, 2]


def test_a_chain_stored_in_pieces_loses_no_parent_before_its_child():
    """Making room for its continuation must not take the chain's own end."""
    with _store(8) as store:
        other, chain = Pages(count=3, size=512, seed=1), Pages(count=8, size=512)
        _fill(store, chain, slice(0, 4))
        _fill(store, other)
        _fill(store, chain, slice(4, 6))
        assert store.batch_exists(chain.keys) == 6
        assert store.batch_exists(other.keys) == 2
        _fill(store, chain, slice(6, 8))
        assert store.batch_exists(chain.keys) == 8


def test_a_page_above_the_capacity_is_refused_and_drops_nothing():
    with _store(4) as store:
        pages, large = Pages(count=3, size=512), Pages(count=1, size=4 * PAGE, place="m-2/kv/all")
        _fill(store, pages)
        with pytest.raises(CapacityError):
            _fill(store, large)
        assert store.batch_exists(pages.keys) == 3


def test_capacity_counts_headers_and_is_never_exceeded():
    with _store(10) as store:
        for seed in range(6):
            _fill(store, Pages(count=4, size=512, seed=seed))
            assert sum(usage.stored_bytes for usage in store.usage()) <= 10 * PAGE
