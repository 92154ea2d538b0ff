"""Which names go into a session, and what becomes of those that were left in one."""

from __future__ import annotations

import threading

import pytest

from l3store.backends.mooncake.sessions import Sessions
from l3store.errors import BackendTimeout, BackendUnavailable

NAMES, POINTERS, SIZES = ["a", "b"], [[1000, 2000], [3000, 4000]], [[128, 64], [128, 64]]


class Calls:
    """Answers as the library does, and keeps what was asked."""

    def __init__(self, **answers):
        self.asked = []
        self._answers = answers

    def __call__(self, name, names, *more):
        self.asked.append((name, list(names)))
        answer = self._answers.get(name, 0)
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            return answer(names, *more)
        return [answer] * len(names)

    def names_of(self, name):
        return [one for asked, names in self.asked if asked == name for one in names]


def arrived(names, pointers, sizes, offsets):
    return [sum(size) for size in sizes]


def test_a_put_is_begun_moved_in_pieces_and_ended():
    def moved(names, pointers, sizes, offsets):
        assert offsets == [[0, 128]] * len(names)
        return arrived(names, pointers, sizes, offsets)

    calls = Calls(batch_put_from_multi_buffer_ranges=moved)
    assert Sessions(calls).put(NAMES, POINTERS, SIZES) == ([0, 1], [], [], 0)
    assert calls.names_of("batch_put_session_end") == NAMES
    assert calls.names_of("batch_put_session_revoke") == []


def test_while_a_name_is_in_a_session_it_enters_no_other():
    inside, go_on = threading.Event(), threading.Event()

    def moved(names, *more):
        inside.set()
        assert go_on.wait(10)
        return arrived(names, *more)

    calls = Calls(batch_put_from_multi_buffer_ranges=moved)
    sessions = Sessions(calls)
    first = threading.Thread(target=sessions.put, args=(NAMES, POINTERS, SIZES))
    first.start()
    assert inside.wait(10)
    begun = len(calls.asked)
    other = ["b", "c"]
    assert sessions.get(["b"], POINTERS[:1], SIZES[:1]) == ({}, [0])
    assert sessions.put(["b"], POINTERS[:1], SIZES[:1]) == ([], [], [0], 0)
    assert len(calls.asked) == begun, "the library was asked for a name that is in a session"
    calls._answers["batch_put_session_start"] = -200
    assert sessions.put(other, POINTERS, SIZES) == ([], [1], [0], 0)
    go_on.set()
    first.join(10)
    calls._answers["batch_put_session_start"] = 0
    assert sessions.put(NAMES, POINTERS, SIZES).stored == [0, 1]


def test_one_that_does_not_arrive_is_revoked_and_the_others_are_not_tried():
    names = [f"n{i}" for i in range(40)]
    pointers, sizes = [[1000, 2000]] * 40, [[128, 1 << 20]] * 40
    calls = Calls(batch_put_from_multi_buffer_ranges=-800)
    written = Sessions(calls).put(names, pointers, sizes)
    assert (written.stored, written.unclear) == ([], list(range(40)))
    assert calls.names_of("batch_put_from_multi_buffer_ranges") == names[:1]
    assert sorted(calls.names_of("batch_put_session_revoke")) == sorted(names)
    assert calls.names_of("batch_put_session_end") == []


def test_after_an_end_that_was_not_answered_nothing_more_is_sent():
    """It may be done later, and after a new beginning it would publish a page without bytes."""
    calls = Calls(batch_put_from_multi_buffer_ranges=arrived, batch_put_session_end=-901)
    assert Sessions(calls).put(NAMES, POINTERS, SIZES) == ([], [], [0, 1], -901)
    assert calls.asked[-1] == ("batch_put_session_end", NAMES)


@pytest.mark.parametrize(
    ("ended", "revoked"),
    [(-900, 0), (-601, -601), (-601, BackendUnavailable("gone")), (-601, BackendTimeout("late"))],
)
def test_what_could_not_be_ended_or_revoked_is_left_alone_from_then_on(ended, revoked):
    calls = Calls(
        batch_put_from_multi_buffer_ranges=arrived, batch_put_session_end=ended,
        batch_put_session_revoke=revoked,
    )  # fmt: skip
    sessions = Sessions(calls)
    assert sessions.put(NAMES, POINTERS, SIZES).stored == []
    calls._answers = {"batch_put_from_multi_buffer_ranges": arrived}
    assert sessions.put(NAMES, POINTERS, SIZES) == ([], [], [0, 1], 0)
    assert sessions.put(["c"], POINTERS[:1], SIZES[:1]).stored == [0]


def test_an_interrupt_within_a_put_revokes_it():
    calls = Calls(batch_put_from_multi_buffer_ranges=KeyboardInterruptOnce())
    sessions = Sessions(calls)
    with pytest.raises(KeyboardInterrupt):
        sessions.put(NAMES, POINTERS, SIZES)
    assert sorted(calls.names_of("batch_put_session_revoke")) == NAMES
    assert sessions.put(NAMES, POINTERS, SIZES).stored == [0, 1]


class KeyboardInterruptOnce:
    def __init__(self):
        self._raised = False

    def __call__(self, *arguments):
        if not self._raised:
            self._raised = True
            raise KeyboardInterrupt
        return arrived(*arguments)


def test_a_master_that_does_not_answer_is_told():
    calls = Calls(batch_put_session_start=-901, batch_get_session_start=-901)
    sessions = Sessions(calls)
    assert sessions.put(NAMES, POINTERS, SIZES).failed == -901
    assert sessions.get(NAMES, POINTERS, SIZES) == ({0: -901, 1: -901}, [])
