"""Anything at once: peers that store, read, delete, damage and are killed, on one full store.

Whatever happened, a moment later all of them see the same pages, each as it was stored, the files
are as many as they may be, and memory and files agree.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from l3store.errors import CapacityError
from tests.backends.nvme import _kit as kit
from tests.backends.nvme._kit import PLACE, SEGMENT, opened, put, readable, some

PLACES = (PLACE, "kit-0/indexer/all")
PREFIXES = 40

# What a peer does. Damage by `spoil` may meet a page that has just left: no matter.
CHURN = """
def churn(seed, calls, places):
    import random
    rng = random.Random(seed)
    for _ in range(calls):
        pages = some(rng.randint(1, 14), seed=rng.randrange(40), place=rng.choice(places))
        what = rng.random()
        if what < 0.5:
            try:
                put(store, pages)
            except CapacityError:
                pass
        elif what < 0.8:
            readable(store, pages)
        elif what < 0.9:
            store.delete(pages.keys[: rng.randint(1, 3)])
        elif what < 0.95:
            try:
                spoil(store, pages.keys[0])
            except (TypeError, KeyError, FileNotFoundError):
                pass
        else:
            look_after(store)
"""


def _churned(start, path, seed, *, writers, segments, rounds):
    rng = random.Random(seed)
    policy = rng.choice(["lru", "sweep"])

    def one_more():
        one = start()
        one.do("from l3store.errors import CapacityError")
        one.do(CHURN)
        return one.open(path, writers=writers, capacity=segments * SEGMENT, evict=policy)

    peers = [one_more() for _ in range(writers)]
    for round_ in range(rounds):
        for number, one in enumerate(peers):
            one.begin(f"churn({seed * 1000 + round_ * 10 + number}, 100, {PLACES})")
        for one in peers:
            one.result()
        assert kit.stored_bytes(path) <= segments * SEGMENT
        views = [
            [one.has(some(seed=prefix, place=place)) for prefix in range(PREFIXES)
             for place in PLACES]
            for one in peers
        ]  # fmt: skip
        assert all(view == views[0] for view in views)
        for one in peers:
            assert one.problems() == []
        victim = rng.randrange(writers)
        peers[victim].kill()
        peers[victim] = one_more()
    return peers


@pytest.mark.parametrize("writers", [2, 4])
def test_peers_that_do_anything_come_to_see_the_same(tmp_path, peer, writers):
    _churned(peer, tmp_path / "s", writers, writers=writers, segments=4 * writers, rounds=3)
    with opened(tmp_path / "s", mode="ro") as store:
        for place in PLACES:
            for prefix in range(PREFIXES):
                readable(store, some(seed=prefix, place=place))
        assert store.check_integrity() == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
def test_peers_that_do_anything_for_long(tmp_path, peer, seed):
    _churned(peer, tmp_path / "s", 100 + seed, writers=3, segments=12, rounds=6)


def test_threads_that_do_anything_come_to_see_the_same(tmp_path):
    """In one process, with more places than segments can be shared out among."""

    def churn(number):
        rng = random.Random(number)
        for _ in range(60):
            place = f"kit-0/kv/T{rng.randrange(6)}of6"
            pages = some(rng.randint(1, 14), seed=rng.randrange(10), place=place)
            what = rng.random()
            if what < 0.5:
                with suppress(CapacityError):
                    put(store, pages)
            elif what < 0.9:
                readable(store, pages)
            else:
                store.delete(pages.keys)

    with opened(tmp_path / "s", capacity=8 * SEGMENT) as store:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(churn, range(6)))
        assert kit.stored_bytes(tmp_path / "s") <= 8 * SEGMENT
        assert store.check_integrity() == []
        there = list(store.scan())
    with opened(tmp_path / "s") as store:
        assert sorted(store.scan()) == sorted(there)
        assert store.check_integrity() == []
