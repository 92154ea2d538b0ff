"""A page that is wrong is a miss, is counted, and is removed; a right one is served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from l3store.errors import BackendUnavailable
from l3store.metrics import REFUSED
from l3store.page import opener
from l3store.wrap import Faulty, Verify


class Uncheckable(Faulty):
    """A store that can delete nothing."""

    def __init__(self, inner):
        super().__init__(inner)
        self.capabilities = replace(self.capabilities, delete=False)


def test_good_pages_are_served(filled, pages, metrics):
    room = pages.room()
    assert Verify(filled, metrics=metrics).page_get(pages.keys, room) == [True] * pages.count
    assert [bytes(r[1]) for r in room] == [pages.payload(i) for i in range(pages.count)]
    assert not metrics.counters()


@pytest.mark.parametrize("kind", ["flip", "short"])
def test_every_damaged_page_is_a_miss_counted_and_removed(filled, pages, metrics, kind):
    store = Verify(Faulty(filled, **{kind: 1.0}), name="m", metrics=metrics)
    assert store.page_get(pages.keys, pages.room()) == [False] * pages.count
    refused = {k[1][1]: n for k, n in metrics.counters().items() if k[0] is REFUSED}
    assert sum(refused.values()) == pages.count


def test_damage_at_rest_is_removed_and_heals(filled, pages, metrics):
    key = pages.keys[3]
    filled._pages[key] = filled._pages[key][:-1] + b"\0"
    store = Verify(filled, name="m", metrics=metrics)
    assert store.page_get(pages.keys, pages.room())[3] is False
    assert store.batch_exists(pages.keys) == 3
    assert store.page_set([key], [pages.sealed()[3]]) == [True]
    assert store.page_get(pages.keys, pages.room()) == [True] * pages.count
    assert metrics.value(REFUSED, "m", "payload") == 1


def test_a_page_that_was_replaced_since_it_was_read_stays(filled, pages):
    """Only the very header that was read is removed."""
    key = pages.keys[0]
    good = filled._pages[key]

    class ReplacedMeanwhile(Faulty):
        def page_get(self, keys, into, check=None):
            filled._pages[key] = bytes(128) + good[128:]  # damaged when it is read
            done = super().page_get(keys, into, check)
            filled._pages[key] = good
            return done

    store = Verify(ReplacedMeanwhile(filled))
    assert store.page_get(pages.keys, pages.room())[0] is False
    assert store.batch_exists(pages.keys) == pages.count


def test_without_delete_a_damaged_page_is_still_a_miss(filled, pages):
    key = pages.keys[0]
    filled._pages[key] = bytes(len(filled._pages[key]))
    assert Verify(Uncheckable(filled)).page_get([key], pages.room()[:1]) == [False]


def test_a_swapped_page_is_refused(filled, pages, metrics):
    one, two = pages.keys[:2]
    filled._pages[one], filled._pages[two] = filled._pages[two], filled._pages[one]
    store = Verify(filled, name="m", metrics=metrics)
    assert store.page_get(pages.keys, pages.room())[:3] == [False, False, True]
    assert metrics.value(REFUSED, "m", "hash") == 2


def test_done_of_an_error_counts_verified_pages_only(filled, pages):
    broken = Faulty(filled, seed=next(
        seed for seed in range(999)
        if Faulty(filled, seed=seed, partial=0.2).meets("partial", pages.keys[5])
        and not any(Faulty(filled, seed=seed, partial=0.2).meets("partial", k)
                    for k in pages.keys[:5])
    ), partial=0.2)  # fmt: skip
    key = pages.keys[1]
    filled._pages[key] = filled._pages[key][:-1] + b"\0"
    with pytest.raises(BackendUnavailable) as caught:
        Verify(broken).page_get(pages.keys, pages.room())
    assert caught.value.done == [True, False, True, True, True, False, False, False]


def test_a_check_that_is_used_twice_is_not_counted_twice(filled, pages, metrics):
    filled._pages[pages.keys[0]] = bytes(128 + pages.size)
    store = Verify(Uncheckable(filled), name="m", metrics=metrics)
    own = opener(pages.keys)
    for _ in range(2):
        store.page_get(pages.keys, pages.room(), own)
        store.page_get(pages.keys, pages.room())
    assert metrics.value(REFUSED, "m", "magic") == 2
    assert own.reasons["magic"] == 2


def test_the_callers_own_check_is_used(filled, pages):
    asked = []
    check = opener(pages.keys)

    def own(i, segments):
        asked.append(i)
        return check(i, segments)

    Verify(filled).page_get(pages.keys, pages.room(), own)
    assert asked == list(range(pages.count))


@pytest.mark.parametrize("known", [[], [True, False], [True, True]])
def test_an_error_that_knows_of_some_pages_only_stays_itself(filled, pages, known):
    class Ends(Faulty):
        def page_get(self, keys, into, check=None):
            super().page_get(keys, into, check)
            raise BackendUnavailable("it ended", done=list(known))

    with pytest.raises(BackendUnavailable, match="it ended") as caught:
        Verify(Ends(filled)).page_get(pages.keys, pages.room())
    assert caught.value.done == known
