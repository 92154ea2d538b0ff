"""Which prefixes of a chain pools can restore together, as DESIGN words: by definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l3store.adapters.sglang.prefixes import all_pages, block_groups, group_hashes, trailing_pages

presence = st.lists(st.booleans(), max_size=24)


def present(*there, of):
    return [page in there for page in range(of)]


def test_all_pages():
    """KV 10, indexer 7: usable 7."""
    kv, indexer = [True] * 10, [*[True] * 7, False, True, True]
    assert max(all_pages(kv) & all_pages(indexer)) == 7
    assert all_pages([]) == all_pages([False, True]) == set()


def test_trailing_pages_are_a_set_of_end_points():
    """{5} legal, 4 and 3 not."""
    assert trailing_pages(present(4, of=5), 1) == {5}
    assert trailing_pages(present(0, 2, of=4), 1) == {1, 3}
    assert trailing_pages(present(2, 3, 4, of=6), 3) == {5}


def test_a_prefix_shorter_than_the_window_needs_all_its_pages():
    assert trailing_pages(present(0, 1, of=4), 3) == {1, 2}
    assert trailing_pages(present(1, 2, of=4), 3) == set()
    assert trailing_pages(present(0, 1, of=2), 100) == {1, 2}


@pytest.mark.parametrize(
    ("first", "second", "usable"), [({1, 3}, {1, 2}, 1), ({3}, {2}, 0), ({2, 4}, {4}, 4)]
)
def test_sets_of_two_ranks_meet_where_both_are_legal(first, second, usable):
    ranks = [
        trailing_pages(present(*(end - 1 for end in ends), of=5), 1) for ends in (first, second)
    ]
    assert ranks == [first, second]
    assert max(set.intersection(*ranks), default=0) == usable


def test_block_groups_count_whole_groups_from_the_start():
    hashes = [f"{i}" for i in range(11)]
    assert group_hashes(hashes, block=4, group=2) == ["2", "3", "6", "7"]
    assert group_hashes(hashes, block=1, group=1) == hashes
    assert group_hashes(hashes[:3], block=4, group=4) == []
    assert block_groups([True, True, True, True], block=4, group=2) == 8
    assert block_groups([True, True, True, False], block=4, group=2) == 4
    assert block_groups([True, False, True, True], block=4, group=2) == 0
    assert block_groups([], block=4, group=2) == 0


@given(presence)
def test_all_pages_by_definition(there):
    legal = {end for end in range(1, len(there) + 1) if all(there[:end])}
    assert all_pages(there) == legal


@given(presence, st.integers(1, 30))
def test_trailing_pages_by_definition(there, window):
    legal = {end for end in range(1, len(there) + 1) if all(there[max(0, end - window) : end])}
    assert trailing_pages(there, window) == legal


@given(presence)
def test_a_window_as_long_as_the_chain_is_all_pages(there):
    assert trailing_pages(there, max(1, len(there))) == all_pages(there)


@given(presence, st.integers(1, 6), st.integers(0, 5))
def test_block_groups_by_definition(there, group, more):
    block = group + more
    whole = 0
    while len(there) >= (whole + 1) * group and all(there[whole * group : (whole + 1) * group]):
        whole += 1
    assert block_groups(there, block, group) == whole * block


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 5))
def test_the_hashes_of_all_groups_say_that_all_whole_blocks_are_there(pages, group, more):
    block = group + more
    asked = group_hashes([f"{i}" for i in range(pages)], block, group)
    assert block_groups([True] * len(asked), block, group) == pages // block * block
