"""Looking for servers: redis-py asks one after another, each as long as its time-outs are.

So it does that in a thread, and a call waits for it no longer than it may.
"""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from redis.sentinel import Sentinel

from l3store.abc import time_left
from l3store.calls import Workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["Looking", "Sentinels"]

Result = TypeVar("Result")


class Looking(Generic[Result]):
    """A look that all threads share which want one while it is under way. Thread-safe.

    Args:
        look: Blocks, and may raise.
    """

    def __init__(self, look: Callable[[], Result]) -> None:
        self._look, self._lock = look, Lock()
        self._worker = Workers(1, "l3store-redis-look")
        self._last: Future[Result] | None = None

    def result(self) -> Result:
        """Returns or raises what the look does; blocks.

        Raises:
            TimeoutError: The deadline of this thread's call has passed; the look goes on.
        """
        with self._lock:
            if self._last is None or self._last.done():
                self._last = self._worker.submit(self._look)
            last = self._last
        left = time_left()
        return last.result(None if left is None else max(left, 0.0))

    def stop(self) -> None:
        """Ends the thread when it is through; does not block."""
        self._worker.stop()


class Sentinels(Sentinel):
    """The sentinels of one master.

    Args:
        name: What they call it.
        *addresses: As for redis-py.
        **options: As for redis-py.
    """

    def __init__(self, name: str, *addresses: Any, **options: Any) -> None:
        super().__init__(*addresses, **options)  # type: ignore[no-untyped-call]
        self._looking: Looking[Any] = Looking(partial(super().discover_master, name))

    def discover_master(self, service_name: str) -> Any:
        """Returns the master's address: called by redis-py, before it connects."""
        return self._looking.result()

    def close(self) -> None:
        """Closes the connections to the sentinels."""
        self._looking.stop()
        for one in self.sentinels:
            one.close()
