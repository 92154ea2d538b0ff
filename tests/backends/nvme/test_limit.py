"""Ranks of one group agree on a number of pages; each keeps no more."""

from __future__ import annotations

import pytest

from l3store import registry
from l3store.errors import CapacityError
from l3store.testing.kit import PLACE, Pages

SIZE = 8192


def _open(path, **options):
    query = "".join(f"&{name}={value}" for name, value in options.items())
    return registry.open(f"nvme://{path}/s?capacity=4MiB&segment=256KiB{query}", raw=True)


def test_a_share_in_pages_follows_from_writers(tmp_path):
    with _open(tmp_path, writers=4) as store:
        (slots,) = {store.sure_pages(SIZE) / 4}
        pages = Pages(count=int(slots), size=SIZE)
        store.page_set(pages.keys, pages.sealed())
        assert len(list((tmp_path / "s").glob("seg-*"))) == 1
        more = Pages(count=1, size=SIZE, seed=1)
        store.page_set(more.keys, more.sealed())
        assert len(list((tmp_path / "s").glob("seg-*"))) == 2


def test_a_limit_is_kept_the_oldest_leave_and_the_end_of_a_chain_first(tmp_path):
    with _open(tmp_path) as store:
        store.limit_pages(PLACE, 20)
        for seed in range(6):
            pages = Pages(count=8, size=SIZE, seed=seed)
            assert store.page_set(pages.keys, pages.sealed()) == [True] * 8
            assert sum(usage.pages for usage in store.usage()) <= 20
            assert store.batch_exists(pages.keys) == 8
        assert store.check_integrity() == []


def test_a_batch_above_the_limit_keeps_its_beginning(tmp_path):
    with _open(tmp_path) as store:
        store.limit_pages(PLACE, 5)
        pages = Pages(count=8, size=SIZE)
        assert store.page_set(pages.keys, pages.sealed()) == [True] * 5 + [False] * 3
        store.limit_pages(PLACE, 0)
        with pytest.raises(CapacityError):
            store.page_set(Pages(seed=1, size=SIZE).keys, Pages(seed=1, size=SIZE).sealed())


def test_other_places_know_no_limit(tmp_path):
    with _open(tmp_path) as store:
        store.limit_pages(PLACE, 1)
        pages = Pages(count=8, size=SIZE, place="conformance-0/indexer/all")
        assert store.page_set(pages.keys, pages.sealed()) == [True] * 8


def test_a_limit_must_make_sense(tmp_path):
    with _open(tmp_path) as store:
        with pytest.raises(ValueError, match="at least 0"):
            store.limit_pages(PLACE, -1)
        with pytest.raises(ValueError, match="place"):
            store.limit_pages("nowhere", 1)
