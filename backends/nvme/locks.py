"""Locks between processes that are waited for, but not for ever: their holder may be stopped."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from l3store.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["held"]

_ASK_AGAIN_SECONDS = 0.0005


@contextmanager
def held(
    take: Callable[[], bool], release: Callable[[], object], seconds: float, problem: str
) -> Iterator[None]:
    """Holds a lock inside the block; blocks until it is free, at most so many seconds.

    Args:
        take: Takes the lock if nobody has it, and returns whether it did.
        release: Gives it back.
        seconds: How long to wait.
        problem: What another process does if it takes longer.

    Raises:
        BackendUnavailable: It took longer.
    """
    until = time.monotonic() + seconds
    while not take():
        if time.monotonic() > until:
            raise BackendUnavailable(f"{problem} for more than {seconds} s; is it stopped?")
        time.sleep(_ASK_AGAIN_SECONDS)
    try:
        yield
    finally:
        release()
