"""A slower store: a fixed time a call and a bandwidth, for tests and benchmarks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from l3store.wrap._base import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.abc import Backend, Check, Segments

__all__ = ["Latency"]


class Latency(Wrapper):
    """Sleeps before each call of the data path, as a distant store would make the caller wait.

    Args:
        inner: The store.
        seconds: A call.
        bytes_per_second: Of the pages moved; None for no limit.
        sleep: Injected by tests.
    """

    def __init__(
        self,
        inner: Backend,
        seconds: float,
        bytes_per_second: float | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._seconds, self._rate, self._sleep = seconds, bytes_per_second, sleep

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102 - as in Backend
        self._sleep(self._seconds)
        return self.inner.batch_exists(keys)

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        self._sleep(self._seconds)
        return self.inner.exists_each(keys)

    def page_get(  # noqa: D102
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        self._sleep(self._seconds + self._transfer(into))
        return self.inner.page_get(keys, into, check)

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        self._sleep(self._seconds + self._transfer(pages))
        return self.inner.page_set(keys, pages)

    def _transfer(self, pages: Sequence[Segments]) -> float:
        if self._rate is None:
            return 0.0
        return sum(piece.nbytes for page in pages for piece in page) / self._rate
