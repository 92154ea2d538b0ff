"""`Opener.each` judges many pages at once, exactly as one call a page would."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l3store import page
from l3store.keys import Chain

PLACES = ("ns/kv/T0of2", "ns/kv/T1of2")
COUNT = 6
SIZE = 24


def batch(segments: int, places: tuple[str, ...] = PLACES[:1]):
    """Keys and pages, in buffers of their own that can be damaged."""
    keys, pages = [], []
    for number, place in enumerate(places):
        chain = Chain(tuple(bytes([number + 1, i + 1]) * 16 for i in range(COUNT)))
        step = SIZE // segments
        payloads = [
            [memoryview(bytearray([i + at]) * step) for at in range(segments)] for i in range(COUNT)
        ]
        keys += chain.keys(place)
        pages += page.seal(place, chain, payloads)
    return keys, pages


def one_by_one(keys, pages, arrived):
    check = page.opener(keys)
    return [came and check(i, pages[i]) for i, came in enumerate(arrived)], check.reasons


@pytest.mark.parametrize("segments", [1, 2, 3, 24])
@pytest.mark.parametrize("places", [PLACES[:1], PLACES])
def test_good_pages_are_good(segments, places):
    keys, pages = batch(segments, places)
    check = page.opener(keys)
    assert check.each(pages, [True] * len(keys)) == [True] * len(keys)
    assert not check.reasons


def test_an_empty_call():
    assert page.opener([]).each([], []) == []


def test_a_page_that_did_not_come_is_not_read():
    keys, pages = batch(1)
    pages[2] = (memoryview(bytes(128)), memoryview(bytes(1)))
    arrived = [i != 2 for i in range(COUNT)]
    check = page.opener(keys)
    assert check.each(pages, arrived) == arrived
    assert not check.reasons
    assert check.each(pages, [False] * COUNT) == [False] * COUNT


@settings(max_examples=400, deadline=None)
@given(
    segments=st.sampled_from([1, 2, 3]),
    places=st.sampled_from([PLACES[:1], PLACES]),
    which=st.integers(0, COUNT - 1),
    bit=st.integers(0, (128 + SIZE) * 8 - 1),
    arrived=st.lists(st.booleans(), min_size=2 * COUNT, max_size=2 * COUNT),
)
def test_any_flipped_bit_is_found_and_named_alike(segments, places, which, bit, arrived):
    keys, pages = batch(segments, places)
    byte, at = bit // 8, 0
    for piece in pages[which]:
        if byte < at + piece.nbytes:
            piece[byte - at] ^= 1 << bit % 8
            break
        at += piece.nbytes
    for came in ([True] * len(keys), arrived[: len(keys)]):
        check = page.opener(keys)
        good = check.each(pages, came)
        assert (good, check.reasons) == one_by_one(keys, pages, came)
        assert good == [there and i != which for i, there in enumerate(came)]


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_swapped_shortened_and_foreign_pages_are_refused(segments):
    keys, pages = batch(segments, PLACES)
    swapped = [*pages[:1], pages[2], pages[1], *pages[3:]]
    shorter = [*pages[:3], (*pages[3][:-1], pages[3][-1][:-1]), *pages[4:]]
    other_place = [*pages[COUNT:], *pages[:COUNT]]
    came = [True] * len(keys)
    for wrong, where in (
        (swapped, {1, 2}), (shorter, {3}), (other_place, set(range(2 * COUNT))),
    ):  # fmt: skip
        check = page.opener(keys)
        assert check.each(wrong, came) == [i not in where for i in range(len(keys))]
        assert check.reasons == one_by_one(keys, wrong, came)[1]


def test_a_header_of_another_length_is_the_callers_mistake():
    keys, pages = batch(1)
    pages[1] = (memoryview(bytes(127)), pages[1][1])
    with pytest.raises(ValueError, match="128 bytes, not 127"):
        page.opener(keys).each(pages, [True] * COUNT)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_some_pages_of_a_call_are_judged_by_their_numbers(segments):
    keys, pages = batch(segments)
    numbers = [4, 1, 3]
    check, some = page.opener(keys), [pages[i] for i in numbers]
    assert check.each(some, [True] * 3, numbers) == [True] * 3
    assert page.judged(check, some, [True, False, True], numbers) == [True, False, True]
    assert not check.reasons
    assert check.each(some, [True] * 3, [1, 4, 3]) == [False, False, True]
    assert check.reasons == {"hash": 2}


def test_a_check_of_the_callers_own_is_asked_page_by_page():
    _, pages = batch(1)
    asked = []

    def check(i, segments):
        asked.append((i, segments is pages[i]))
        return i != 3

    assert page.judged(check, [pages[5], pages[3], pages[0]], [True, True, False], [5, 3, 0]) == [
        True, False, False
    ]  # fmt: skip
    assert asked == [(5, True), (3, True)]
