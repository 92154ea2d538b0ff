"""Every rank makes the same votes in the same order, whatever happens on it and whenever."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

from l3store.testing._votes import Habits, run, tally

SEEDS, PART = 20_000, 1_000
HABITS = {
    "a vote is left out when the rank has found nothing": Habits(skips_empty=True),
    "the number of batches is that of the rank's own hit": Habits(counts_own_hit=True),
    "no votes of a rank without memory": Habits(unallocated_skips=True),
    "the votes end where the abort is heard": Habits(aborted_skips=True),
}


def test_20_000_orders_of_votes_without_a_violation():
    """Each is a group of 2 to 4 ranks with up to 6 tickets, in an order of its own."""
    kinds: Counter[str] = Counter()
    parts = [range(first, first + PART) for first in range(0, SEEDS, PART)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for found, told in pool.map(tally, parts):
            kinds += found
            told.pop("right", None)
            assert not told
    assert kinds == {"right": SEEDS}


@pytest.mark.parametrize("habit", HABITS)
def test_what_engines_get_wrong_is_found_and_without_tags_it_is_silent(habit):
    seeds = range(400)
    tagged, told = tally(seeds, HABITS[habit])
    untagged, silent = tally(seeds, replace(HABITS[habit], tags=False))
    print(
        f"{habit}: {1 - tagged['right'] / len(seeds):.0%} of the runs fail: slip "
        f"{tagged['slip'] / len(seeds):.0%}, hang {tagged['hang'] / len(seeds):.0%}; without tags "
        f"{untagged['wrong'] / len(seeds):.0%} are silently wrong"
    )
    assert tagged["slip"] > 0
    assert tagged["hang"] > 0
    assert tagged["wrong"] == 0
    assert "do not pair, in step" in told["slip"]
    assert "rank " in told["slip"]
    assert untagged["wrong"] > 0
    assert untagged["slip"] == 0
    assert "was heard" in silent["wrong"] or "settles at" in silent["wrong"]


def test_votes_that_are_right_need_no_tags():
    assert tally(range(400), Habits(tags=False))[0] == {"right": 400}


def test_a_seed_is_always_the_same_run():
    assert [run(seed) for seed in range(20)] == [run(seed) for seed in range(20)]
    assert len({run(seed).rounds for seed in range(20)}) > 5
