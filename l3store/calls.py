"""How calls run: a gate that `close` can shut, and worker threads that may be abandoned."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from l3store.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Gate", "Workers", "refuse_fork", "together"]

Result = TypeVar("Result")


class Gate:
    """Counts the running calls of a backend and lets none in once it is shut.

    Used as ``with self._gate: ...`` around every call. Thread-safe.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._running = 0
        self._shut = False
        self._told = False  # somebody was told that nothing runs any more
        self._changed = Condition(Lock())

    def __enter__(self) -> None:
        with self._changed:
            if self._shut:
                raise BackendUnavailable(f"{self._what} is closed")
            self._running += 1

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._running -= 1
            if self._shut:
                self._changed.notify_all()

    def shut(self, seconds: float | None) -> bool:
        """Lets no further call in and waits for the running ones, at most `seconds` (None: ever).

        Returns:
            True when nothing runs any more, and to one caller only: it may now free what the calls
            used. After False because of time a later `shut` may return True.
        """
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            self._shut = True
            while self._running:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            first, self._told = not self._told, True
            return first


class Workers:
    """A few daemon threads, started when needed.

    Unlike `concurrent.futures.ThreadPoolExecutor`, whose threads the interpreter joins at exit,
    these never keep a process alive that has a call hanging in the kernel.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = Lock()
        self._started = 0
        self._owed = 0  # tasks that were submitted and are not done
        self._stopped = False
        self._process = os.getpid()

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Runs `task` on a worker; does not block. Cancelling works until a worker took it.

        Raises:
            BackendUnavailable: Stopped, or no thread can be started and none is there.
        """
        refuse_fork(self._process)  # its threads are not here, its locks may be held
        future: Future[Result] = Future()
        with self._lock:
            if self._stopped:
                raise BackendUnavailable("the store is closed")
            if self._owed >= self._started and self._started < self._count:
                self._start()
            self._owed += 1
            self._queue.put((future, task))
        return future

    def _start(self) -> None:
        try:
            Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError as error:  # too many threads, or the interpreter is about to end
            if not self._started:
                raise BackendUnavailable(f"no thread for the store: {error}") from error
        else:
            self._started += 1

    def stop(self) -> None:
        """Ends the threads once the queue is empty; does not block."""
        with self._lock:
            self._stopped = True
            for _ in range(self._started):
                self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, task = item
            if future.set_running_or_notify_cancel():
                try:
                    result = task()
                except BaseException as error:
                    self._settle(future.set_exception, error)
                else:
                    self._settle(future.set_result, result)
                    del result
            else:
                self._settle(lambda _: None, None)
            del item, future, task  # an idle worker holds nobody's memory

    def _settle(self, deliver: Callable[[Any], None], outcome: Any) -> None:
        with self._lock:
            self._owed -= 1
        deliver(outcome)


def together(
    workers: Workers, tasks: Sequence[Callable[[], Result]]
) -> tuple[list[Result], list[BaseException]]:
    """Runs all tasks, the first one in this thread, and waits for all of them, whatever happens.

    So also after an interrupt from the keyboard, and another one: the tasks work on the caller's
    memory, which is his again when this returns or raises.

    Returns:
        What the tasks returned, and what they raised, in no particular order.
    """
    futures: list[Future[Result]] = []
    results: list[Result] = []
    failures: list[BaseException] = []
    interrupt: BaseException | None = None
    try:
        for task in tasks[1:]:
            futures.append(workers.submit(task))  # noqa: PERF401 - may raise midway
        if tasks:
            results.append(tasks[0]())
    except Exception as error:
        failures.append(error)
    except BaseException as error:
        interrupt = error
    while futures:
        try:
            failure = futures[-1].exception()
        except BaseException as error:
            interrupt = error
            continue
        ended = futures.pop()
        if failure is None:
            results.append(ended.result())
        else:
            failures.append(failure)
    if interrupt is not None:
        raise interrupt
    return results, failures


def refuse_fork(process: int) -> None:
    """Returns if this is still the process in which a store was opened.

    Raises:
        BackendUnavailable: It is a fork of that one.
    """
    if os.getpid() != process:
        raise BackendUnavailable(
            "the store was opened before this process was forked: open it anew in this one"
        )
