"""Every policy against a dict of pages: children first, busy pages stay, and all may go at last."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l3store.backends.nvme.eviction import DEFAULT, NONE, POLICIES, FamilySweep, LeafLRU
from l3store.backends.nvme.space import Space

SLOTS = 24
LAST_TICK = 2**32 - 1

policies = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


class Model:
    """What a policy must know, the slow way."""

    def __init__(self):
        self.parent = {}
        self.used_at = {}
        self.now = 0

    def added(self, slots, parents):
        self.now += 1
        for slot in slots:
            self.parent.setdefault(slot, NONE)
            self.used_at[slot] = self.now
        for slot, parent in zip(slots, parents, strict=True):
            if self.parent[slot] == NONE and parent in self.parent:
                self.parent[slot] = parent
                if slot in self.ancestors(slot):
                    self.parent[slot] = NONE

    def ancestors(self, slot):
        seen = []
        while (slot := self.parent[slot]) != NONE and slot not in seen:
            seen.append(slot)
        return seen

    def used(self, slots):
        self.now += 1
        self.used_at.update((slot, self.now) for slot in slots if slot in self.parent)

    def removed(self, slots):
        for slot in slots:
            if slot in self.parent:
                self.gone(slot)
                for child in self.children(slot):
                    self.parent[child] = NONE

    def gone(self, slot):
        del self.parent[slot], self.used_at[slot]

    def children(self, slot):
        return [child for child, parent in self.parent.items() if parent == slot]

    def leaves(self):
        return set(self.parent).difference(self.parent.values())

    def evictable(self, busy):
        """Pages of which neither they nor anything behind them is busy."""
        kept = {slot for slot in busy if slot in self.parent}
        kept.update(*map(self.ancestors, kept))
        return set(self.parent) - kept

    def evicted(self, slots, busy):
        for slot in slots:
            assert slot in self.parent
            assert slot not in busy
            assert not self.children(slot)
            self.gone(slot)


def _batch(draw_parent):
    pair = st.tuples(st.integers(0, SLOTS - 1), draw_parent)
    return st.lists(pair, max_size=10, unique_by=lambda pair: pair[0])


NUMBERS = st.lists(st.integers(0, SLOTS + 3), max_size=SLOTS)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("added"), _batch(st.integers(-2, SLOTS + 3))),
        st.tuples(st.just("chain"), st.permutations(range(SLOTS))),
        st.tuples(st.just("used"), NUMBERS),
        st.tuples(st.just("removed"), NUMBERS),
        st.tuples(st.just("evict"), st.integers(0, SLOTS), st.sets(st.integers(0, SLOTS - 1))),
    ),
    max_size=30,
)
# Where the ticks are when the history begins.
BEGIN = st.sampled_from([0, LAST_TICK - 4, LAST_TICK - 1, LAST_TICK])


def _play(policy, steps, begin, after_eviction):
    policy._now = begin
    model = Model()
    for what, *value in steps:
        if what == "evict":
            count, busy = value
            at_most = len(model.evictable(busy))
            chosen = policy.evict(count, busy)
            assert min(count, at_most) <= len(chosen) <= at_most
            after_eviction(model, count, busy, chosen)
            model.evicted(chosen, busy)
        elif what == "chain":
            new = [slot for slot in value[0][:8] if slot not in model.parent]
            for known in (policy, model):
                known.added(new, [NONE, *new][: len(new)])
        elif what == "added":
            pairs = value[0]
            for known in (policy, model):
                known.added([slot for slot, _ in pairs], [parent for _, parent in pairs])
        else:
            getattr(policy, what)(value[0])
            getattr(model, what)(value[0])
        assert len(policy) == len(model.parent)
    left = policy.evict(SLOTS, ())
    model.evicted(left, ())
    assert not model.parent
    assert len(policy) == 0
    assert policy.evict(1, ()) == []


@policies
@given(steps=STEPS, begin=BEGIN)
@settings(max_examples=300)
def test_children_first_busy_never_and_all_in_the_end(make, steps, begin):
    _play(make(), steps, begin, lambda *_: None)


@given(steps=STEPS, begin=BEGIN)
@settings(max_examples=300)
def test_lru_takes_the_leaf_that_was_used_longest_ago(steps, begin):
    def check(model, count, busy, chosen):
        assert len(chosen) <= count
        copy = Model()
        copy.parent, copy.used_at = dict(model.parent), dict(model.used_at)
        for slot in chosen:
            assert copy.used_at[slot] == min(copy.used_at[leaf] for leaf in copy.leaves() - busy)
            copy.gone(slot)

    _play(LeafLRU(), steps, begin, check)


@given(steps=STEPS, extent=st.integers(1, SLOTS))
def test_an_extent_of_any_length(steps, extent):
    _play(FamilySweep(extent=extent), steps, 0, lambda *_: None)


def _filled(make, chains, length):
    policy = make()
    for chain in range(chains):
        slots = range(chain * length, (chain + 1) * length)
        policy.added(slots, [NONE, *slots[:-1]])
    return policy


@policies
def test_a_page_that_is_read_again_and_again_stays(make):
    policy = _filled(make, 64, 8)
    for _ in range(600):
        policy.used(range(8))
        gone = policy.evict(8, ())
        assert not set(gone).intersection(range(8))
        policy.added(gone, [NONE] * len(gone))


def test_pages_that_were_read_since_they_were_stored_outlive_a_scan_longer_than_the_store():
    scanned = {}
    for name, make in POLICIES.items():
        policy = _filled(make, 64, 16)

        def scan(policy=policy):
            gone = policy.evict(64, ())
            policy.added(sorted(gone), [NONE] * len(gone))  # nobody asks for these
            return set(gone)

        for _ in range(40):  # until the age at which pages leave is known
            scan()
        read = sorted(policy.evict(64, ()))[:64]
        policy.added(read, [NONE, *read[:-1]])
        policy.used(read)
        scanned[name] = 0
        while not (gone := scan()).intersection(read):
            scanned[name] += len(gone)
    assert scanned["lru"] <= 1024 < 1.3 * 1024 < scanned["sweep"]


@policies
def test_the_end_of_the_ticks_makes_old_pages_no_younger_and_loses_none(make):
    policy = make()
    policy.added([0, 1], [NONE, 0])
    policy._now = LAST_TICK - 1  # many calls later
    policy.added([20, 21], [NONE, 20])
    policy.used([21, 20])
    policy.used([21, 20])
    assert len(policy) == 4
    assert policy.evict(2, ()) == [1, 0]
    assert policy.evict(2, ()) == [21, 20]


@policies
def test_pages_of_a_process_before_leave_before_all_that_came_since_the_oldest_first(make):
    policy = make()
    policy.added(range(100, 132), [NONE] * 32)
    policy.added(range(32), [NONE] * 32, [3600.0] * 16 + [60.0] * 16)
    gone = {*policy.evict(16, ())}
    assert {*range(16)} <= gone < {*range(32)}
    gone |= {*policy.evict(32 - len(gone), ())}
    assert {*range(32)} <= gone


@policies
def test_one_busy_page_does_not_stop_the_rest(make):
    policy = _filled(make, 4, 64)
    gone = policy.evict(1000, {63, 64})  # the last page of a chain, and the first of another
    assert sorted({*range(256)}.difference(gone)) == [*range(64), 64]
    assert len(policy) == 65
    assert policy.evict(1, range(65)) == []
    assert sorted(policy.evict(65, ())) == [*range(65)]


@policies
def test_a_chain_of_many_pages_with_a_busy_end_costs_one_walk(make):
    length = 50_000  # a walk from every page of it would be 10**9 steps
    policy = _filled(make, 1, length)
    assert policy.evict(10, {length - 1}) == []
    assert len(policy.evict(length, ())) == length


@policies
def test_pages_that_came_before_their_parents_get_them_later(make):
    policy = make()
    policy.added([5], [NONE])  # its parent is not here
    policy.added([3, 4], [NONE, 3])
    policy.added([5], [4])  # set again
    assert policy.evict(3, ()) == [5, 4, 3]


@policies
def test_a_slot_that_holds_another_page_has_nothing_of_the_one_before(make):
    policy = make()
    policy.added([0, 1, 2], [NONE, 0, 1])
    policy.removed([1])
    policy.added([1, 3], [NONE, 1])
    policy.removed([2])  # was a child of the first page in slot 1, and not of this one
    gone = policy.evict(3, ())
    assert gone.index(3) < gone.index(1)
    assert sorted(gone) == [0, 1, 3]


def test_entries_of_lru_that_came_out_of_use_do_not_pile_up():
    policy = LeafLRU()
    policy.added([0], [NONE])
    for _ in range(500):
        policy.added([1], [0])
        policy.used([0, 1])
        policy.removed([1])
    for _ in range(500):
        policy.added([1], [0])
        assert policy.evict(1, ()) == [1]
        policy.used([0])
    assert len(policy._leaves) < 100


def test_the_default_needs_at_most_22_bytes_a_page():
    pages = 200_000
    slots, parents = list(range(pages)), [NONE, *range(pages - 1)]
    gc.collect()
    tracemalloc.start()
    policy = POLICIES[DEFAULT]()
    for at in range(0, pages, 1000):
        policy.added(slots[at : at + 1000], parents[at : at + 1000])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(policy) == pages
    assert size <= 22 * pages


def test_the_default_frees_longer_runs_than_lru():
    """Chains of many lengths, some of them read again, in a store ten times overwritten."""
    mean = {}
    for name, make in POLICIES.items():
        chance, policy, space = random.Random(3), make(), Space()
        for segment in range(8):
            space.give(range(segment * 513, segment * 513 + 512))
        chains, taken, runs = [], 0, 0
        while taken < 40_960:
            length = chance.randint(1, 40)
            if space.free < length:
                space.give(sorted(policy.evict(length - space.free, ())))
            found = space.take(length)
            slots = [first + i for first, count in found for i in range(count)]
            policy.added(slots, [NONE, *slots[:-1]])
            chains.append(slots)
            policy.used(chains[-1 - min(len(chains) - 1, int(chance.expovariate(1 / 60)))])
            taken += length
            if taken > 20_480:
                runs += len(found)
        mean[name] = 20_480 / runs
    assert mean["sweep"] > 2 * mean["lru"]
