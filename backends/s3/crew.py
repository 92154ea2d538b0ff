"""Requests of one call, several at once, none of which the call waits for past its deadline.

A request cannot be broken off from outside. So it runs on a thread that is left behind at the
deadline, and whatever touches the caller's memory does so under a `Lease` that has ended by then.
"""

from __future__ import annotations

import math
import time
from itertools import count
from threading import Condition, Lock
from typing import TYPE_CHECKING

from l3store.abc import time_left
from l3store.errors import BackendTimeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from l3store.calls import Workers

__all__ = ["Lease", "Over", "run"]


class Over(Exception):
    """The call has ended: its memory is the caller's again."""


class Lease:
    """The time in which requests may touch the caller's memory: ``with lease: ...``. Thread-safe.

    Args:
        until: When the call must have ended, by the monotonic clock; None: no matter when.
    """

    def __init__(self, until: float | None = None) -> None:
        self._until = until
        self._changed = Condition(Lock())
        self._touching = 0
        self._over = False

    def left(self) -> float:
        """Returns the seconds until the deadline of the call, which may be infinite."""
        return math.inf if self._until is None else self._until - time.monotonic()

    # A context manager itself: each page takes it, and a generator would cost as much again.

    def __enter__(self) -> None:
        """Keeps `end` waiting, so what is done inside must be short, or end by itself in time.

        Raises:
            Over: Too late.
        """
        with self._changed:
            if self._over:
                raise Over
            self._touching += 1

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._touching -= 1
            if self._over:
                self._changed.notify_all()

    def end(self) -> None:
        """Lets nobody touch it any more, and waits for those who do."""
        with self._changed:
            self._over = True
            while self._touching:
                self._changed.wait()


def run(
    workers: Workers, number: int, width: int, one: Callable[[int, Lease], bool], what: str
) -> None:
    """Calls `one` for 0 to `number` - 1 on up to `width` workers, until one fails or says no.

    Blocks until all have ended, or the deadline of the running call has passed. None is begun
    after one that failed, that returned False, or that the deadline found.

    Raises:
        BackendTimeout: The deadline passed. What still runs touches no memory under the lease.
        BaseException: What `one` raised, the first of it.
    """
    left = time_left()
    until = None if left is None else time.monotonic() + left
    lease, numbers, stopped = Lease(until), count(), [False]

    def work() -> None:
        while not stopped[0] and (i := next(numbers)) < number:
            try:
                if not one(i, lease):
                    stopped[0] = True
            except BaseException:
                stopped[0] = True
                raise

    futures: list[Future[None]] = []
    errors: list[BaseException] = []
    try:
        futures += [workers.submit(work) for _ in range(min(width, number))]
        for future in futures:
            error = future.exception(None if until is None else max(until - time.monotonic(), 0.0))
            if error is not None and not isinstance(error, Over):
                errors.append(error)
    except TimeoutError:
        errors.append(BackendTimeout(f"{what}: the call did not end within its deadline"))
    finally:
        stopped[0] = True
        for future in futures:
            future.cancel()
        lease.end()
    if errors:
        raise errors[0]
