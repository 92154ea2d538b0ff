"""No call outlasts its deadline, and no late call touches the caller's memory."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from l3store.abc import time_left
from l3store.errors import BackendTimeout, BackendUnavailable, CapacityError, ConfigError
from l3store.metrics import LATE
from l3store.page import opener
from l3store.wrap import Deadline, Verify
from l3store.wrap._base import Wrapper
from l3store.wrap._staging import SLICE_BYTES, slices

DEADLINE = 0.15
PATIENT = 10.0


class Hanging(Wrapper):
    """Cannot be interrupted; `page_get` and `page_set` wait to be let go, then do their work."""

    def __init__(self, inner):
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, interruptible=False)
        self.let_go, self.begun, self.finished = (threading.Event() for _ in range(3))

    def _work(self, call):
        self.begun.set()
        assert self.let_go.wait(20)
        try:
            return call()
        finally:
            self.finished.set()

    def page_get(self, keys, into, check=None):
        return self._work(lambda: super(Hanging, self).page_get(keys, into, check))

    def page_set(self, keys, pages):
        return self._work(lambda: super(Hanging, self).page_set(keys, pages))

    def batch_exists(self, keys):
        return self._work(lambda: super(Hanging, self).batch_exists(keys))

    def scan(self, place=None):
        yield from self._work(lambda: super(Hanging, self).scan(place))


@pytest.fixture
def hanging(filled):
    store = Hanging(filled)
    yield store
    store.let_go.set()


def _untouched(room):
    return all(not any(piece) for segments in room for piece in segments)


@pytest.mark.parametrize("late", ["wait", "staged", "pending"])
def test_in_time_all_ways_do_the_same(hanging, pages, late):
    hanging.let_go.set()
    store = Deadline(Verify(hanging), PATIENT, late)
    room = pages.room()
    assert store.page_get(pages.keys, room) == [True] * pages.count
    assert [bytes(r[1]) for r in room] == [pages.payload(i) for i in range(pages.count)]
    assert store.page_set(pages.keys, pages.sealed()) == [True] * pages.count
    assert store.batch_exists(pages.keys) == pages.count


def test_staged_ends_at_the_deadline_and_a_late_read_reaches_nobody(hanging, pages, metrics):
    store = Deadline(hanging, DEADLINE, "staged", name="m", metrics=metrics)
    room = pages.room()
    start = time.monotonic()
    with pytest.raises(BackendTimeout, match=r"0.15 s") as caught:
        store.page_get(pages.keys, room)
    assert time.monotonic() - start < 5
    assert caught.value.done == [False] * pages.count
    assert caught.value.pending is None
    hanging.let_go.set()
    assert hanging.finished.wait(10)
    time.sleep(0.05)
    assert _untouched(room)
    assert metrics.value(LATE, "m") == 1


def test_staged_a_late_write_stores_what_was_handed_over(hanging, pages, filled):
    """The caller reuses its page at once; what the late call stores is the page, not the reuse."""
    filled.delete(pages.keys)
    sealed = pages.sealed()
    store = Deadline(hanging, DEADLINE, "staged")
    with pytest.raises(BackendTimeout):
        store.page_set(pages.keys, sealed)
    for segments in sealed:
        for piece in segments:
            piece[:] = bytes(len(piece))
    hanging.let_go.set()
    assert hanging.finished.wait(10)
    room = pages.room()
    assert Verify(filled).page_get(pages.keys, room) == [True] * pages.count


def test_wait_returns_when_the_call_does_and_holds_the_breaker_open_meanwhile(hanging, pages):
    store = Deadline(hanging, DEADLINE, "wait")
    room, caught = pages.room(), []

    def read():
        with pytest.raises(BackendTimeout) as error:
            store.page_get(pages.keys, room)
        caught.append(error.value)

    reader = threading.Thread(target=read)
    reader.start()
    assert hanging.begun.wait(10)
    assert store.late_calls() == 0
    time.sleep(2 * DEADLINE)
    assert store.late_calls() == 1
    assert reader.is_alive()
    hanging.let_go.set()
    reader.join(10)
    assert store.late_calls() == 0
    assert caught[0].done == [True] * pages.count, "those pages are good"
    assert bytes(room[0][1]) == pages.payload(0)


def test_pending_ends_at_the_deadline_and_tells_when_the_memory_is_free(hanging, pages):
    store = Deadline(hanging, DEADLINE, "pending")
    room = pages.room()
    with pytest.raises(BackendTimeout) as caught:
        store.page_get(pages.keys, room)
    pending = caught.value.pending
    assert not pending.done()
    assert store.late_calls() == 1
    assert _untouched(room)
    hanging.let_go.set()
    assert pending.result(10) == [True] * pages.count
    assert bytes(room[0][1]) == pages.payload(0)
    assert store.late_calls() == 0


def test_a_walk_that_hangs_is_left_at_the_deadline(hanging, pages, monkeypatch):
    monkeypatch.setattr("l3store.wrap.deadline._SCANNED", 2)
    store = Deadline(hanging, DEADLINE)
    with pytest.raises(BackendTimeout):
        list(store.scan())
    hanging.let_go.set()
    assert sorted(Deadline(hanging, PATIENT).scan()) == sorted(pages.keys)


@pytest.mark.parametrize("late", ["wait", "staged", "pending"])
def test_a_query_that_hangs_is_left_at_the_deadline(hanging, pages, late):
    with pytest.raises(BackendTimeout):
        Deadline(hanging, DEADLINE, late).batch_exists(pages.keys)


@pytest.mark.parametrize("call", ["delete", "headers", "exists_each", "batch_exists"])
def test_a_late_query_is_about_the_keys_it_was_given(filled, pages, call):
    asked, let_go, left = [], threading.Event(), threading.Event()

    class Late(Wrapper):
        def __init__(self, inner):
            super().__init__(inner)
            self.capabilities = replace(inner.capabilities, interruptible=False)

        def _late(self, keys, *rest):
            assert let_go.wait(20)
            asked.extend(keys)
            left.set()

        delete = headers = exists_each = batch_exists = _late

    keys = pages.keys[:4]
    with pytest.raises(BackendTimeout):
        getattr(Deadline(Late(filled), DEADLINE), call)(keys)
    keys[:] = pages.keys[4:]  # the caller goes on with its list
    let_go.set()
    assert left.wait(20)
    assert asked == pages.keys[:4]


def test_when_all_workers_hang_a_call_times_out_without_having_begun(hanging, pages):
    store = Deadline(hanging, DEADLINE, "pending", workers=1)
    for _ in range(2):
        with pytest.raises(BackendTimeout) as caught:
            store.page_get(pages.keys, pages.room())
    assert "no worker" in str(caught.value)
    assert caught.value.pending is None, "nothing was begun, so the memory is free"


def test_an_interruptible_backend_is_told_how_long_it_has(memory, pages):
    told = []

    class Interruptible(Wrapper):
        def batch_exists(self, keys):
            told.append((time_left(), threading.current_thread()))
            return 0

    Deadline(Interruptible(memory), 5.0).batch_exists(pages.keys)
    assert 4 < told[0][0] <= 5
    assert told[0][1] is threading.current_thread()
    assert time_left() is None


def test_an_uninterruptible_backend_is_told_too(filled, pages):
    told = []

    class Asking(Hanging):
        def page_get(self, keys, into, check=None):
            told.append(time_left())
            return [True] * len(keys)

    for late in ("wait", "staged", "pending"):
        Deadline(Asking(filled), 5.0, late).page_get(pages.keys, pages.room())
    assert all(4 < left <= 5 for left in told)


def test_a_timeout_of_the_backend_itself_comes_through(memory, pages):
    class TimesOut(Hanging):
        def page_get(self, keys, into, check=None):
            raise BackendTimeout("of its own", done=[True] + [False] * (len(keys) - 1))

    for late in ("wait", "staged", "pending"):
        with pytest.raises(BackendTimeout, match="of its own") as caught:
            Deadline(TimesOut(memory), PATIENT, late).page_get(pages.keys, pages.room())
        assert caught.value.done[1:] == [False] * (pages.count - 1)


def test_a_batch_is_staged_in_slices_of_bounded_size():
    segments = (memoryview(bytearray(128)), memoryview(bytearray(5 << 20)))
    assert slices([segments] * 7) == [range(0, 3), range(3, 6), range(6, 7)]
    huge = (memoryview(bytearray(128)), memoryview(bytearray(SLICE_BYTES + 1)))
    assert slices([huge, segments, huge]) == [range(0, 1), range(1, 2), range(2, 3)]
    assert slices([]) == []


class Sliced(Hanging):
    """Refuses what a script says, slice by slice."""

    def __init__(self, inner, answers):
        super().__init__(inner)
        self.answers = list(answers)

    def page_set(self, keys, pages):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [answer] * len(keys)

    page_get = lambda self, keys, into, check=None: self.page_set(keys, into)  # noqa: E731


@pytest.fixture
def large(pages):
    """Four pages, each a slice of its own."""
    pages.count, pages.size = 4, SLICE_BYTES - 200
    pages.__post_init__()
    shared = memoryview(bytearray(pages.size))
    header = memoryview(bytearray(128))
    return pages.keys, [(header, shared)] * 4


def test_full_in_a_later_slice_is_false_there_and_no_error(memory, large):
    full = [CapacityError("full"), CapacityError("full", done=[False])]
    store = Deadline(Sliced(memory, [True, *full, True]), PATIENT, "staged")
    assert store.page_set(*large) == [True, False, False, True], "the last one was there already"


def test_full_in_the_first_slice_is_a_capacity_error(memory, large):
    full = CapacityError("full", done=[False])
    store = Deadline(Sliced(memory, [full] * 4), PATIENT, "staged")
    with pytest.raises(CapacityError) as caught:
        store.page_set(*large)
    assert caught.value.done == [False] * 4


def test_an_error_in_a_later_slice_tells_what_is_done(memory, large):
    gone = BackendUnavailable("gone", done=[False])
    store = Deadline(Sliced(memory, [True, True, gone]), PATIENT, "staged")
    with pytest.raises(BackendUnavailable) as caught:
        store.page_set(*large)
    assert caught.value.done == [True, True, False, False]


def test_a_bad_key_in_a_later_slice_keeps_the_first_from_being_stored(memory, large):
    keys, sealed = large
    inner = Sliced(memory, [True] * 4)
    with pytest.raises(ValueError, match="page hash"):
        Deadline(inner, PATIENT, "staged").page_set([*keys[:3], "m/kv/all/x"], sealed)
    assert len(inner.answers) == 4, "no call was made"


def test_a_check_sees_each_page_under_its_own_number(hanging, pages):
    hanging.let_go.set()
    seen = []
    check = opener(pages.keys)
    Deadline(Verify(hanging), PATIENT, "staged").page_get(
        pages.keys, pages.room(), lambda i, s: seen.append(i) or check(i, s)
    )
    assert seen == list(range(pages.count))


@pytest.mark.parametrize("late", ["wait", "staged", "pending"])
def test_unequal_lengths_are_refused(hanging, pages, late):
    hanging.let_go.set()
    store = Deadline(hanging, PATIENT, late)
    with pytest.raises(ValueError, match="8 keys, but"):
        store.page_get(pages.keys, pages.room()[:2])
    with pytest.raises(ValueError, match="8 keys, but"):
        store.page_set(pages.keys, pages.sealed()[:2])


def test_close_leaves_a_hanging_call_behind_and_refuses_later_ones(filled, pages):
    class NeverCloses(Hanging):
        def close(self):
            self.let_go.wait(20)

    inner = NeverCloses(filled)
    store = Deadline(inner, DEADLINE, "staged")
    store.close()
    with pytest.raises(BackendUnavailable, match="closed"):
        store.batch_exists(pages.keys)
    store.close()
    inner.let_go.set()


def test_an_unknown_way_names_the_nearest(memory):
    with pytest.raises(ConfigError, match=r"'stage'.*did you mean 'staged'"):
        Deadline(memory, 1.0, "stage")


class Registering(Hanging):
    def __init__(self, inner):
        super().__init__(inner)
        self.capabilities = replace(self.capabilities, registration=True)
        self.told = []

    def register_buffer(self, buffer):
        self.told.append(buffer)


@pytest.mark.parametrize("late", ["wait", "pending"])
def test_memory_that_pages_move_in_is_announced(filled, late):
    inner, buffer = Registering(filled), memoryview(bytearray(8))
    with Deadline(inner, DEADLINE, late) as store:
        store.register_buffer(buffer)
        assert store.capabilities.registration
    assert inner.told == [buffer]


def test_with_private_pages_nobody_needs_to_announce_his_own(filled):
    inner = Registering(filled)
    with Deadline(inner, DEADLINE, "staged") as store:
        assert not store.capabilities.registration
        with pytest.raises(NotImplementedError, match="registration"):
            store.register_buffer(memoryview(bytearray(8)))
    assert inner.told == []
