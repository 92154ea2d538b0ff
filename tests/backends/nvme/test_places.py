"""Several places in one store: who gets which segments."""

from __future__ import annotations

import pytest

from tests.backends.nvme._kit import SEGMENT, SLOTS, opened, put, some


@pytest.mark.parametrize("reopened", [False, True])
def test_segments_without_pages_go_to_the_place_that_needs_room(tmp_path, reopened):
    """Also to one whose pages are smaller, so that it has more slots than the other already."""
    large = some(16, size=SEGMENT - 8192, place="kit-0/large/all")
    small = [some(seed=seed) for seed in range(16)]
    with opened(tmp_path / "s", capacity=16 * SEGMENT) as store:
        assert all(put(store, large))
        assert all(store.delete(large.keys))
        if not reopened:
            _fill(store, small)
    if reopened:
        with opened(tmp_path / "s") as store:
            _fill(store, small)


def _fill(store, batches):
    for pages in batches:
        assert all(put(store, pages))
    assert [store.batch_exists(pages.keys) for pages in batches] == [SLOTS] * len(batches)
    assert store.check_integrity() == []
