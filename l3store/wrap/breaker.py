"""A store that does not answer is left alone for a while, so that callers are not slowed by it."""

from __future__ import annotations

import time
from threading import Lock
from typing import TYPE_CHECKING, Literal, TypeVar

from l3store.errors import BackendTimeout, BackendUnavailable, L3Error
from l3store.metrics import METRICS, OPENINGS, REJECTED
from l3store.wrap._base import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from l3store.abc import Backend, Check, PlaceUsage, Segments
    from l3store.metrics import Metrics

__all__ = ["Breaker"]

Result = TypeVar("Result")


class Breaker(Wrapper):
    """Refuses calls at once while the store is known not to answer.

    Closed: calls pass; `failures` calls in a row that end with `BackendUnavailable` or
    `BackendTimeout` open it. Open: calls raise `BackendUnavailable` at once. After `cooldown`
    seconds one call probes: if it succeeds the breaker closes, else the cooldown doubles, up to
    `max_cooldown`. It is open, too, while a call is running past its deadline on the caller's
    memory (`late_calls`). No other error counts: a full store answers.

    `health` and `close` always pass. Thread-safe; never blocks.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        failures: int = 3,
        cooldown: float = 0.5,
        max_cooldown: float = 30.0,
        late_calls: Callable[[], int] = lambda: 0,
        name: str = "",
        metrics: Metrics = METRICS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._threshold, self._first_cooldown = failures, cooldown
        self._max_cooldown, self._late_calls, self._clock = max_cooldown, late_calls, clock
        self._name, self._metrics = name, metrics
        self._lock = Lock()
        self._failed = 0
        self._cooldown = cooldown
        self._opened_at: float | None = None
        self._probing = False
        self._closings = 0
        self._last_error = ""
        self.openings = 0
        """How often it opened; a fact that only grows."""
        self.rejected = 0
        """Calls refused while open."""

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        """Returns whether calls pass, are refused, or the next one would probe."""
        with self._lock:
            if self._opened_at is None:
                return "open" if self._late_calls() else "closed"
            return "half-open" if self._due(self._opened_at) and not self._probing else "open"

    def _due(self, opened_at: float) -> bool:
        return self._clock() - opened_at >= self._cooldown

    def _guarded(self, call: Callable[[], Result]) -> Result:
        probe = self._admit()
        closings = self._closings
        try:
            result = call()
        except (BackendUnavailable, BackendTimeout) as error:
            if closings == self._closings:  # or a later probe knows better
                self._failure(error, probe)
            raise
        except L3Error:
            self._success(probe)  # the store answered, only not what the caller hoped for
            raise
        except BaseException:
            self._undecided(probe)  # a caller's mistake says nothing about the store
            raise
        self._success(probe)
        return result

    def _admit(self) -> bool:
        """Returns whether this call is the probe, or refuses it."""
        late = self._late_calls()
        with self._lock:
            if self._opened_at is None and not late:
                return False
            due = self._opened_at is not None and self._due(self._opened_at)
            if due and not late and not self._probing:
                self._probing = True
                return True
            self.rejected += 1
            self._metrics.add((REJECTED, (self._name,), 1))
            why = f"{late} call(s) past the deadline" if late else self._last_error
        raise BackendUnavailable(f"the breaker is open, the store is left alone: {why}")

    def _failure(self, error: Exception, probe: bool) -> None:
        with self._lock:
            self._failed += 1
            self._last_error = str(error)
            if probe:
                self._probing = False
                self._cooldown = min(self._cooldown * 2, self._max_cooldown)
                self._opened_at = self._clock()
            elif self._failed >= self._threshold and self._opened_at is None:
                self._opened_at = self._clock()
                self.openings += 1
                self._metrics.add((OPENINGS, (self._name,), 1))

    def _undecided(self, probe: bool) -> None:
        if probe:
            with self._lock:
                self._probing = False

    def _success(self, probe: bool) -> None:
        if not probe and not self._failed:
            return
        with self._lock:
            self._failed = 0
            if probe:
                self._probing, self._opened_at = False, None
                self._cooldown = self._first_cooldown
                self._closings += 1

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102 - as in Backend
        return self._guarded(lambda: self.inner.batch_exists(keys))

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        return self._guarded(lambda: self.inner.exists_each(keys))

    def page_get(  # noqa: D102
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        return self._guarded(lambda: self.inner.page_get(keys, into, check))

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        return self._guarded(lambda: self.inner.page_set(keys, pages))

    def put_meta(self, name: str, data: bytes) -> None:  # noqa: D102
        self._guarded(lambda: self.inner.put_meta(name, data))

    def get_meta(self, name: str) -> bytes | None:  # noqa: D102
        return self._guarded(lambda: self.inner.get_meta(name))

    def list_meta(self) -> list[str]:  # noqa: D102
        return self._guarded(self.inner.list_meta)

    def scan(self, place: str | None = None) -> Iterator[str]:  # noqa: D102
        return self._guarded(lambda: self.inner.scan(place))

    def usage(self) -> list[PlaceUsage]:  # noqa: D102
        return self._guarded(self.inner.usage)

    def delete(  # noqa: D102
        self, keys: Sequence[str], headers: Sequence[bytes | None] | None = None
    ) -> list[bool]:
        return self._guarded(lambda: self.inner.delete(keys, headers))

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:  # noqa: D102
        return self._guarded(lambda: self.inner.headers(keys))
