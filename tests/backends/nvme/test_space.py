"""Free runs, against a set of numbers."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from l3store.backends.nvme.space import Space

SLOTS, SEGMENTS = 12, 4
STRIDE = SLOTS + 1
ALL = [k * STRIDE + i for k in range(SEGMENTS) for i in range(SLOTS)]


def _runs(slots):
    """The longest runs of neighbours in a set."""
    grouped = groupby(enumerate(sorted(slots)), key=lambda pair: pair[1] - pair[0])
    runs = [[slot for _, slot in group] for _, group in grouped]
    return [(run[0], len(run)) for run in runs]


def _slots(runs):
    return [first + i for first, length in runs for i in range(length)]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("give"), st.permutations(ALL).flatmap(
            lambda order: st.integers(0, len(order)).map(lambda n: order[:n]))),
        st.tuples(st.just("give in order"), st.sets(st.sampled_from(ALL)).map(sorted)),
        st.tuples(st.just("take"), st.integers(0, len(ALL) + 2)),
        st.tuples(st.just("drop"), st.integers(0, SEGMENTS - 1)),
    ),
    max_size=40,
)  # fmt: skip


@given(STEPS)
def test_what_is_free_is_known_as_the_longest_runs(steps):
    space, free = Space(), set()
    for what, value in steps:
        if what == "take":
            taken = _slots(space.take(value))
            assert len(taken) == len(set(taken)) == min(value, len(free))
            assert free.issuperset(taken)
            free.difference_update(taken)
        elif what == "drop":
            gone = range(value * STRIDE, (value + 1) * STRIDE)
            space.drop(gone.start, gone.stop)
            free.difference_update(gone)
        else:
            new = [slot for slot in value if slot not in free]
            space.give(new)
            free.update(new)
        assert space.runs() == _runs(free)
        assert space.free == len(free)


@given(st.sets(st.sampled_from(ALL), min_size=1), st.integers(1, len(ALL)))
def test_the_smallest_run_that_holds_all_is_taken_else_the_longest_ones(slots, count):
    space = Space()
    space.give(sorted(slots))
    lengths = sorted(length for _, length in _runs(slots))
    taken = space.take(count)
    left = min(count, len(slots))
    for first, length in taken:
        assert first in dict(_runs(slots))  # from the beginning of a run
        fitting = [n for n in lengths if n >= left]
        of = min(fitting) if fitting else max(lengths)
        assert length == min(of, left)
        assert dict(_runs(slots))[first] == of
        lengths.remove(of)
        left -= length


def test_runs_of_two_segments_never_become_one():
    space = Space()
    space.give(ALL)
    assert [length for _, length in space.take(2 * SLOTS)] == [SLOTS, SLOTS]


def test_what_was_cut_off_one_run_comes_back_as_one():
    space = Space()
    space.give(range(SLOTS))
    pieces = [space.take(5), space.take(5), space.take(2)]
    assert pieces == [[(0, 5)], [(5, 5)], [(10, 2)]]
    for piece in (pieces[0], pieces[2], pieces[1]):
        space.give(_slots(piece))
    assert space.runs() == [(0, SLOTS)]
