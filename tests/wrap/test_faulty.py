"""Faults are the same for a key and a seed, and each kind does what it says."""

from __future__ import annotations

import threading

import pytest

from l3store.errors import BackendUnavailable
from l3store.wrap import Faulty, Latency
from l3store.wrap.faulty import KINDS


def test_the_same_seed_meets_the_same_pages(filled, pages):
    chosen = [[Faulty(filled, seed=s, miss=0.5).meets("miss", k) for k in pages.keys]
              for s in (1, 1, 2)]  # fmt: skip
    assert chosen[0] == chosen[1] != chosen[2]


def test_a_rate_is_a_share_of_keys(filled):
    faulty = Faulty(filled, miss=0.25)
    met = sum(faulty.meets("miss", f"key {i}") for i in range(4000))
    assert 900 < met < 1100


def test_miss(filled, pages):
    assert Faulty(filled, miss=1.0).page_get(pages.keys, pages.room()) == [False] * pages.count


def test_error_comes_before_anything_is_done(memory, pages):
    with pytest.raises(BackendUnavailable) as caught:
        Faulty(memory, error=1.0).page_set(pages.keys, pages.sealed())
    assert caught.value.done == [False] * pages.count
    assert memory.batch_exists(pages.keys) == 0


def test_partial_does_the_pages_before(memory, pages):
    seed = next(s for s in range(999) if [
        Faulty(memory, seed=s, partial=0.3).meets("partial", k) for k in pages.keys
    ][:4] == [False, False, False, True])  # fmt: skip
    with pytest.raises(BackendUnavailable) as caught:
        Faulty(memory, seed=seed, partial=0.3).page_set(pages.keys, pages.sealed())
    assert caught.value.done == [True] * 3 + [False] * 5
    assert memory.exists_each(pages.keys) == caught.value.done


def test_flip_changes_exactly_one_bit(filled, pages):
    room, good = pages.room(), pages.room()
    filled.page_get(pages.keys, good)
    assert Faulty(filled, flip=1.0).page_get(pages.keys, room) == [True] * pages.count
    for wrong, right in zip(room, good, strict=True):
        difference = int.from_bytes(b"".join(wrong)) ^ int.from_bytes(b"".join(right))
        assert difference.bit_count() == 1


def test_short_spoils_the_second_half_only(filled, pages):
    room, good = pages.room(), pages.room()
    filled.page_get(pages.keys, good)
    assert Faulty(filled, short=1.0).page_get(pages.keys, room) == [True] * pages.count
    half = (128 + pages.size) // 2
    wrong, right = b"".join(room[0]), b"".join(good[0])
    assert wrong[:half] == right[:half]
    assert all(a != b for a, b in zip(wrong[half:], right[half:], strict=True))


def test_hang_waits_to_be_released(filled, pages):
    faulty = Faulty(filled, hang=1.0)
    assert not faulty.capabilities.interruptible
    done = []
    thread = threading.Thread(target=lambda: done.append(faulty.batch_exists(pages.keys)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert faulty.hanging == 1
    faulty.release()
    thread.join(10)
    assert (done, faulty.hanging) == ([pages.count], 0)


def test_delay_sleeps(filled, pages):
    slept = []
    Faulty(filled, delay=1.0, delay_seconds=3.0, sleep=slept.append).batch_exists(pages.keys)
    assert slept == [3.0]


def test_the_check_is_left_to_the_wrapper_above(filled):
    assert not Faulty(filled).capabilities.checks


def test_bad_kinds_and_rates_are_refused(filled):
    with pytest.raises(ValueError, match="unknown fault 'mis'; known: miss"):
        Faulty(filled, mis=1.0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        Faulty(filled, miss=1.5)
    assert set(KINDS) == {"miss", "error", "partial", "delay", "hang", "short", "flip"}


def test_latency_sleeps_for_the_call_and_the_bytes(filled, pages):
    slept = []
    store = Latency(filled, 0.5, bytes_per_second=192.0, sleep=slept.append)
    store.batch_exists(pages.keys)
    store.page_get(pages.keys, pages.room())
    store.page_set(pages.keys, pages.sealed())
    assert slept == [0.5, 8.5, 8.5]
