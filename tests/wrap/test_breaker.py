"""When calls pass, are refused, and probe."""

from __future__ import annotations

import pytest

from l3store.errors import BackendTimeout, BackendUnavailable, CapacityError
from l3store.metrics import OPENINGS, REJECTED
from l3store.wrap import Breaker
from l3store.wrap._base import Wrapper


class Scripted(Wrapper):
    """Raises what it is told to."""

    error: Exception | None = None
    calls = 0

    def batch_exists(self, keys):
        self.calls += 1
        if self.error is not None:
            raise self.error
        return super().batch_exists(keys)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def inner(memory):
    return Scripted(memory)


@pytest.fixture
def breaker(inner, clock, metrics):
    return Breaker(inner, failures=3, cooldown=1.0, max_cooldown=4.0, clock=clock, name="m",
                   metrics=metrics)  # fmt: skip


def _fail(breaker, times, error=BackendUnavailable):
    for _ in range(times):
        with pytest.raises(error):
            breaker.batch_exists([])


def test_it_opens_after_failures_in_a_row_and_then_refuses_at_once(inner, breaker, metrics):
    inner.error = BackendTimeout("slow")
    _fail(breaker, 3, BackendTimeout)
    assert (breaker.state, breaker.openings) == ("open", 1)
    with pytest.raises(BackendUnavailable, match=r"breaker is open.*slow"):
        breaker.batch_exists([])
    assert inner.calls == 3
    assert (metrics.value(OPENINGS, "m"), metrics.value(REJECTED, "m")) == (1, 1)


def test_a_success_between_starts_the_count_again(inner, breaker):
    for _ in range(3):
        inner.error = BackendUnavailable("gone")
        _fail(breaker, 2)
        inner.error = None
        breaker.batch_exists([])
    assert breaker.state == "closed"


def test_one_call_probes_after_the_cooldown_and_closes_it(inner, breaker, clock):
    inner.error = BackendUnavailable("gone")
    _fail(breaker, 3)
    clock.now += 0.99
    _fail(breaker, 1)
    assert inner.calls == 3
    clock.now += 0.01
    assert breaker.state == "half-open"
    inner.error = None
    assert breaker.batch_exists([]) == 0
    assert breaker.state == "closed"


def test_the_cooldown_doubles_up_to_its_limit_and_is_reset(inner, breaker, clock):
    inner.error = BackendUnavailable("gone")
    _fail(breaker, 3)
    waited = []
    for _ in range(4):
        before = clock.now
        while breaker.state != "half-open":
            clock.now += 0.25
        waited.append(clock.now - before)
        _fail(breaker, 1)
    assert waited == [1.0, 2.0, 4.0, 4.0]
    assert breaker.openings == 1
    clock.now += 4.0
    inner.error = None
    breaker.batch_exists([])
    inner.error = BackendUnavailable("gone")
    _fail(breaker, 3)
    clock.now += 1.0
    assert breaker.state == "half-open"


def test_only_one_call_probes(inner, breaker, clock):
    inner.error = BackendUnavailable("gone")
    _fail(breaker, 3)
    clock.now += 1.0
    seen = []

    def probe(keys):
        with pytest.raises(BackendUnavailable, match="breaker is open"):
            breaker.exists_each([])  # a second call while the first one probes
        seen.append(True)
        return 0

    inner.batch_exists = probe
    breaker.batch_exists([])
    assert seen == [True]
    assert breaker.state == "closed"


def test_failures_of_calls_from_before_a_good_probe_do_not_open_it_again(inner, breaker, clock):
    def call(depth):
        """Calls that began while the store was out, and fail after it came back."""
        if depth:
            with pytest.raises(BackendUnavailable):
                breaker._guarded(lambda: call(depth - 1))
            raise BackendUnavailable("late news")
        inner.error = BackendUnavailable("down")
        _fail(breaker, 3)
        inner.error, clock.now = None, clock.now + 1.0
        breaker.batch_exists([])
        assert breaker.state == "closed"
        raise BackendUnavailable("late news")

    with pytest.raises(BackendUnavailable, match="late news"):
        call(4)
    assert (breaker.state, breaker.openings) == ("closed", 1)


@pytest.mark.parametrize("error", [CapacityError("full"), ValueError("key"), KeyError("bug")])
def test_no_other_error_counts(inner, breaker, error):
    inner.error = error
    for _ in range(9):
        with pytest.raises(type(error)):
            breaker.batch_exists([])
    assert breaker.state == "closed"


@pytest.mark.parametrize("error", [ValueError("key"), KeyError("bug")])
def test_a_callers_mistake_neither_closes_it_nor_starts_the_count_again(
    inner, breaker, clock, error
):
    inner.error = BackendUnavailable("gone")
    _fail(breaker, 2)
    inner.error = error
    _fail(breaker, 1, type(error))
    inner.error = BackendUnavailable("gone")
    _fail(breaker, 1)
    assert breaker.state == "open"
    clock.now += 1.0
    inner.error = error
    _fail(breaker, 1, type(error))
    assert breaker.state == "half-open", "the next call probes"


def test_a_probe_that_ends_in_another_error_closes_it(inner, breaker, clock):
    inner.error = BackendUnavailable("gone")
    _fail(breaker, 3)
    clock.now += 1.0
    inner.error = CapacityError("full")
    _fail(breaker, 1, CapacityError)
    assert breaker.state == "closed"


def test_it_is_open_while_a_call_is_late_on_the_callers_memory(inner, clock):
    late = [1]
    breaker = Breaker(inner, late_calls=lambda: late[0], clock=clock)
    _fail(breaker, 1)
    assert (breaker.state, inner.calls) == ("open", 0)
    late[0] = 0
    assert breaker.batch_exists([]) == 0


def test_health_and_close_always_pass(inner, breaker):
    inner.error = BackendUnavailable("gone")
    _fail(breaker, 3)
    breaker.health()
    breaker.close()
