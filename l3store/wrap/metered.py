"""Counts what goes through: calls, pages by outcome, bytes, seconds, errors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from l3store.errors import L3Error
from l3store.metrics import BYTES, CALL_SECONDS, CALLS, ERRORS, METRICS, PAGES
from l3store.wrap._base import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.abc import Backend, Check, Segments
    from l3store.metrics import Metrics

__all__ = ["Metered"]

Result = TypeVar("Result")


class Metered(Wrapper):
    """Counts data and existence calls under the label `name`. Costs a few microseconds a call."""

    def __init__(self, inner: Backend, *, name: str, metrics: Metrics = METRICS) -> None:
        super().__init__(inner)
        self._name, self._metrics = name, metrics

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102 - as in Backend
        found = self._timed("batch_exists", lambda: self.inner.batch_exists(keys))
        # Behind the first hole nothing was asked for: one miss at most.
        self._outcomes("batch_exists", "hit", "miss", found, int(found < len(keys)))
        return found

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        found = self._timed("exists_each", lambda: self.inner.exists_each(keys))
        hits = sum(found)
        self._outcomes("exists_each", "hit", "miss", hits, len(found) - hits)
        return found

    def page_get(  # noqa: D102
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        done = self._timed("page_get", lambda: self.inner.page_get(keys, into, check), into)
        return self._moved("page_get", "hit", "miss", done, into)

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        done = self._timed("page_set", lambda: self.inner.page_set(keys, pages), pages)
        return self._moved("page_set", "stored", "refused", done, pages)

    def _timed(self, op: str, call: Callable[[], Result], pages: Sequence[Segments] = ()) -> Result:
        start = time.perf_counter()
        try:
            return call()
        except Exception as error:
            self._metrics.add((ERRORS, (self._name, op, type(error).__name__), 1))
            if isinstance(error, L3Error) and any(error.done):
                good = "hit" if op == "page_get" else "stored"
                self._moved(op, good, "", error.done, pages)
            raise
        finally:
            self._metrics.add((CALLS, (self._name, op), 1))
            self._metrics.observe(CALL_SECONDS, (self._name, op), time.perf_counter() - start)

    def _moved(
        self, op: str, good: str, bad: str, done: list[bool], pages: Sequence[Segments]
    ) -> list[bool]:
        moved = sum(done)
        size = sum([piece.nbytes for i, ok in enumerate(done) if ok for piece in pages[i]])
        self._metrics.add((BYTES, (self._name, op), size))
        self._outcomes(op, good, bad, moved, len(done) - moved if bad else 0)
        return done

    def _outcomes(self, op: str, good: str, bad: str, hits: int, misses: int) -> None:
        self._metrics.add(
            (PAGES, (self._name, op, good), hits), (PAGES, (self._name, op, bad), misses)
        )
