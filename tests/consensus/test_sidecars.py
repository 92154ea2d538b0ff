"""What this rank's pools let it say: DESIGN's three rules."""

from __future__ import annotations

import pytest

from l3store.consensus.sidecars import reach
from l3store.errors import ConfigError


def test_a_pool_of_all_pages_limits_the_prefix():
    assert reach(10, {"indexer": ("all_pages", 7)}) == (7, None, 0)
    assert reach(5, {"indexer": ("all_pages", 7)}).pages == 5


def test_a_trailing_pool_says_at_which_ends_its_window_is_stored():
    assert reach(10, {"mamba": ("trailing_pages", [3, 5])}) == (10, 0b101001, 0)
    assert reach(10, {"mamba": ("trailing_pages", [])}).ends == 1


def test_an_end_behind_the_prefix_is_none():
    assert reach(4, {"mamba": ("trailing_pages", [3, 5])}).ends == 0b1001


def test_ends_of_two_trailing_pools_are_those_of_both():
    pools = {"mamba": ("trailing_pages", [1, 3]), "swa": ("trailing_pages", [1, 2])}
    assert reach(10, pools).ends == 0b11


def test_the_order_of_pools_does_not_matter():
    pools = {"mamba": ("trailing_pages", [3, 5]), "indexer": ("all_pages", 4)}
    assert reach(9, pools) == reach(9, dict(reversed(pools.items()))) == (4, 0b1001, 0)


def test_block_groups_are_reported_and_never_limit():
    pools = {"ring": ("block_groups", 2), "other": ("block_groups", 1)}
    assert reach(10, pools) == (10, None, 1)
    assert reach(10, {"ring": ("block_groups", 0)}) == (10, None, 0)


def test_an_unknown_rule_names_the_pool_and_the_nearest():
    with pytest.raises(ConfigError, match=r"'trailing' of pool 'swa'.*'trailing_pages'"):
        reach(1, {"swa": ("trailing", 1)})


@pytest.mark.parametrize(("rule", "stored"), [("all_pages", [1]), ("trailing_pages", 3)])
def test_what_is_stored_must_fit_the_rule(rule, stored):
    with pytest.raises(ConfigError, match=f"'p'.*{rule}"):
        reach(1, {"p": (rule, stored)})
