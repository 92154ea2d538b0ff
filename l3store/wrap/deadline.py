"""No call outlasts its deadline, and no late call touches memory that the caller may reuse.

A backend that is `interruptible` ends its calls itself, within `l3store.abc.time_left`. The others
may hang in the kernel or in a client library. What may then be done depends on whose memory the
call works on:

- queries (`batch_exists`, `headers`, ...) work on nobody's memory: they run on a worker thread and
  are abandoned at the deadline;
- ``late=wait``: `page_get` and `page_set` run in the caller's thread; past the deadline the call is
  waited for, the breaker is open meanwhile (`late_calls`), and `BackendTimeout` is raised when it
  has returned, with what it did in `.done`;
- ``late=staged``: they run on a worker thread on private staging pages and are abandoned with them
  at the deadline (one copy more: about 0.1 CPU s/GB);
- ``late=pending``: they run on a worker thread on the caller's memory; `BackendTimeout` is raised
  at the deadline, and the memory belongs to the call until its `.pending` is done. Only for owners
  that keep such pages out of use.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Literal, TypeVar

from l3store.abc import Check, call_deadline
from l3store.calls import Workers
from l3store.errors import (
    BackendTimeout,
    BackendUnavailable,
    CapacityError,
    ConfigError,
    L3Error,
    nearest,
)
from l3store.metrics import LATE, METRICS
from l3store.page import check_batch
from l3store.wrap._base import Wrapper
from l3store.wrap._staging import Staging, slices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from l3store.abc import Backend, PlaceUsage, Segments
    from l3store.metrics import Metrics

__all__ = ["Deadline", "Late"]

Result = TypeVar("Result")
Late = Literal["wait", "staged", "pending"]
_CHOICES = ("wait", "staged", "pending")
_SCANNED = 1000  # keys that one call walks over

_log = logging.getLogger(__name__)


class Deadline(Wrapper):
    """Bounds every call of `inner` to `seconds`.

    Args:
        inner: The store; verification belongs inside, so that it is bounded, too.
        seconds: The deadline of one call.
        late: See the module; None for what the backend's capabilities say. Without effect on an
            interruptible backend.
        name: The label ``backend`` of what is counted.
        metrics: Where late calls are counted.
        workers: Threads for calls that may have to be abandoned. When all of them hang, a further
            call times out without having begun; the breaker opens long before.

    Raises:
        ConfigError: `late` is unknown.
    """

    def __init__(
        self,
        inner: Backend,
        seconds: float,
        late: Late | None = None,
        *,
        name: str = "",
        metrics: Metrics = METRICS,
        workers: int = 16,
    ) -> None:
        super().__init__(inner)
        self._late: str = self.capabilities.late if late is None else late
        if self._late not in _CHOICES:
            raise ConfigError(f"late={self._late!r} is unknown{nearest(self._late, _CHOICES)}")
        self._seconds, self._name, self._metrics = seconds, name, metrics
        self._interruptible = inner.capabilities.interruptible
        if self._late == "staged" and not self._interruptible:
            # What moves then is private pages: nobody needs to announce his own.
            self.capabilities = replace(self.capabilities, registration=False)
        self._workers = Workers(workers, "l3store-deadline")
        self._staging = Staging()
        self._lock = Lock()
        self._closed = False
        self._on_callers_memory: dict[object, float] = {}  # call -> when it is late

    def late_calls(self) -> int:
        """Returns how many calls are past their deadline and still work on the caller's memory.

        The breaker is open while it is not 0. Cheap, does not block.
        """
        if not self._on_callers_memory:
            return 0
        now = time.monotonic()
        with self._lock:
            return sum(at < now for at in self._on_callers_memory.values())

    def register_buffer(self, buffer: memoryview) -> None:  # noqa: D102
        if not self.capabilities.registration:
            raise self._lacks("register_buffer", "registration")
        self.inner.register_buffer(buffer)

    # -- data ------------------------------------------------------------------------------

    def page_get(  # noqa: D102 - as in Backend
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        def read() -> list[bool]:
            return self.inner.page_get(keys, into, check)

        if self._interruptible:
            return self._in_place(read)
        if len(keys) != len(into):
            raise ValueError(f"{len(keys)} keys, but buffers for {len(into)} pages")
        if self._late == "wait":
            return self._waited(read)
        if self._late == "pending":
            keys, into = tuple(keys), tuple(into)
            return self._pending(read)
        return self._in_slices(
            keys, into, lambda part, left: self._staged_get(keys, into, check, part, left)
        )

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        def write() -> list[bool]:
            return self.inner.page_set(keys, pages)

        if self._interruptible:
            return self._in_place(write)
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys, but {len(pages)} pages")
        if self._late == "wait":
            return self._waited(write)
        if self._late == "pending":
            keys, pages = tuple(keys), tuple(pages)
            return self._pending(write)
        return self._in_slices(
            keys, pages, lambda part, left: self._staged_set(keys, pages, part, left)
        )

    def _in_place(self, call: Callable[[], Result]) -> Result:
        with call_deadline(self._seconds):
            return call()

    @contextmanager
    def _working_on_callers_memory(self, late_at: float) -> Iterator[None]:
        token = object()
        with self._lock:
            self._on_callers_memory[token] = late_at
        try:
            yield
        finally:
            with self._lock:
                del self._on_callers_memory[token]

    def _waited(self, call: Callable[[], list[bool]]) -> list[bool]:
        start = time.monotonic()
        with self._working_on_callers_memory(start + self._seconds):
            done = self._in_place(call)
        took = time.monotonic() - start
        if took > self._seconds:
            self._count_late()
            raise BackendTimeout(
                f"the call returned {took:.3f} s after it began; its deadline was "
                f"{self._seconds:g} s",
                done=done,
            )
        return done

    def _count_late(self) -> None:
        self._metrics.add((LATE, (self._name,), 1))

    def _pending(self, call: Callable[[], list[bool]]) -> list[bool]:
        late_at = time.monotonic() + self._seconds  # counted from here, not from a worker's start

        def on_callers_memory() -> list[bool]:
            with self._working_on_callers_memory(late_at):
                return self._in_place(call)

        return self._on_worker(on_callers_memory, self._seconds, pending=True)

    def _in_slices(
        self,
        keys: Sequence[str],
        pages: Sequence[Segments],
        call: Callable[[range, float], list[bool]],
    ) -> list[bool]:
        """Calls slice by slice, so that staging memory is bounded whatever the batch."""
        until = time.monotonic() + self._seconds
        parts = slices(pages)
        if len(parts) > 1:
            check_batch(keys, pages)  # else a late slice could refuse what an early one has stored
        done: list[bool] = []
        full: CapacityError | None = None
        for part in parts:
            try:
                done += call(part, until - time.monotonic())
            except CapacityError as error:
                # The others are tried all the same: what is there already is a success.
                full = error
                done += _padded(error.done, len(part))
            except L3Error as error:
                done += error.done
                error.done = _padded(done, len(pages))
                raise
        if full is not None and not any(done):
            full.done = _padded(done, len(pages))
            raise full
        return _padded(done, len(pages))

    def _staged_get(
        self,
        keys: Sequence[str],
        into: Sequence[Segments],
        check: Check | None,
        part: range,
        left: float,
    ) -> list[bool]:
        staged = self._staging.take([into[i] for i in part])
        here = [keys[i] for i in part]
        shifted: Check | None = None
        if check is not None:
            outer = check

            def shifted(i: int, segments: Segments) -> bool:
                return outer(part[i], segments)

        try:
            done = self._on_worker(lambda: self.inner.page_get(here, staged.pages, shifted), left)
        except L3Error as error:
            if not isinstance(error, BackendTimeout):
                staged.copy_out([into[i] for i in part], error.done)
            raise
        staged.copy_out([into[i] for i in part], done)
        self._staging.give_back(staged)
        return done

    def _staged_set(
        self, keys: Sequence[str], pages: Sequence[Segments], part: range, left: float
    ) -> list[bool]:
        staged = self._staging.take([pages[i] for i in part])
        staged.copy_in([pages[i] for i in part])
        here = [keys[i] for i in part]
        done = self._on_worker(lambda: self.inner.page_set(here, staged.pages), left)
        self._staging.give_back(staged)
        return done

    # -- everything that works on nobody's memory --------------------------------------------

    def _query(self, call: Callable[[], Result]) -> Result:
        if self._interruptible:
            return self._in_place(call)
        return self._on_worker(call, self._seconds)

    def _on_worker(
        self, call: Callable[[], Result], left: float, *, pending: bool = False
    ) -> Result:
        """Runs `call` on a worker thread and leaves it there when `left` seconds have passed."""
        if self._closed:
            raise BackendUnavailable("the store is closed")
        until = time.monotonic() + left

        def bounded() -> Result:
            with call_deadline(until - time.monotonic()):
                return call()

        future = self._workers.submit(bounded)
        try:
            return future.result(max(left, 0.0))
        except TimeoutError:
            if future.cancel():
                raise BackendTimeout(
                    f"no worker was free within {self._seconds:g} s: earlier calls hang"
                ) from None
            if future.done():
                return future.result()  # it ended at the last moment, or raised a time-out itself
            self._count_late()
            raise BackendTimeout(
                f"the call did not end within {self._seconds:g} s",
                pending=_as_pages(future) if pending else None,
            ) from None

    # A late call has lists of its own, too: the caller may fill his with other keys by then.

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102
        own = tuple(keys)
        return self._query(lambda: self.inner.batch_exists(own))

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        own = tuple(keys)
        return self._query(lambda: self.inner.exists_each(own))

    def put_meta(self, name: str, data: bytes) -> None:  # noqa: D102
        own = bytes(data)
        self._query(lambda: self.inner.put_meta(name, own))

    def get_meta(self, name: str) -> bytes | None:  # noqa: D102
        return self._query(lambda: self.inner.get_meta(name))

    def list_meta(self) -> list[str]:  # noqa: D102
        return self._query(self.inner.list_meta)

    def scan(self, place: str | None = None) -> Iterator[str]:  # noqa: D102
        return self._walked(self._query(lambda: self.inner.scan(place)))

    def _walked(self, found: Iterator[str]) -> Iterator[str]:
        # Each part has the deadline; the walk as a whole is as long as the store is large.
        while part := self._query(lambda: list(islice(found, _SCANNED))):
            yield from part

    def usage(self) -> list[PlaceUsage]:  # noqa: D102
        return self._query(self.inner.usage)

    def delete(  # noqa: D102
        self, keys: Sequence[str], headers: Sequence[bytes | None] | None = None
    ) -> list[bool]:
        own, expected = tuple(keys), None if headers is None else tuple(headers)
        return self._query(lambda: self.inner.delete(own, expected))

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:  # noqa: D102
        own = tuple(keys)
        return self._query(lambda: self.inner.headers(own))

    def health(self) -> None:  # noqa: D102
        self._query(self.inner.health)

    def close(self) -> None:
        """Closes `inner`, at most for one deadline; a call that hangs is left behind."""
        if self._closed:
            return
        try:
            self._query(self.inner.close)
        except BackendTimeout:
            _log.warning(
                "closing did not end within %g s: a call hangs in the store", self._seconds
            )
        self._closed = True
        self._workers.stop()


def _padded(done: list[bool], length: int) -> list[bool]:
    return done + [False] * (length - len(done))


def _as_pages(future: Future[Result]) -> Future[list[bool]]:
    """The future of a data call, as what it is: only those are asked for with ``pending``."""
    return future  # type: ignore[return-value]
