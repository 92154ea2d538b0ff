"""Every error that L3Store raises, each also a builtin that callers already handle.

| error | one-line meaning |
|---|---|
| `ConfigError` | a name, option or descriptor is wrong; nothing was opened, nothing was changed |
| `BackendUnavailable` | the store cannot be reached, refused the call, or is closed |
| `BackendTimeout` | the deadline passed before the call ended |
| `CapacityError` | the store is full and kept not one page of the call |
| `IntegrityError` | bytes are not the page they claim to be |
| `ConsensusError` | ranks disagree, or one of them is gone |

A miss is not an error: it is ``False``.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

__all__ = [
    "BackendTimeout",
    "BackendUnavailable",
    "CapacityError",
    "ConfigError",
    "ConsensusError",
    "IntegrityError",
    "L3Error",
    "nearest",
]


class L3Error(Exception):
    """Base of all errors of L3Store.

    Attributes:
        done: For an error of `page_get` or `page_set`: one bool for each key of the call, True
            where that page is good nevertheless (read and checked, or stored). Empty when the
            call never began.
    """

    def __init__(self, message: str, *, done: Sequence[bool] = ()) -> None:
        super().__init__(message)
        self.done: list[bool] = list(done)


class ConfigError(L3Error, ValueError):
    """A name, option, size or descriptor is wrong; the message names the nearest valid choice."""


class BackendUnavailable(L3Error, ConnectionError):
    """The store cannot be reached, refused the call, or is closed."""


class BackendTimeout(L3Error, TimeoutError):
    """The deadline passed before the call ended.

    Attributes:
        pending: None, or (deadline option ``late=pending`` only) a future that is done when the
            call has returned. Until then the caller's memory belongs to the call. Its result is
            the call's list of bool, its exception the call's error; neither un-does the timeout.
    """

    def __init__(
        self,
        message: str,
        *,
        done: Sequence[bool] = (),
        pending: Future[list[bool]] | None = None,
    ) -> None:
        super().__init__(message, done=done)
        self.pending = pending


class CapacityError(L3Error, OSError):
    """The store is full and kept not one page of the call."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class IntegrityError(L3Error, ValueError):
    """Bytes are not the page they claim to be.

    Attributes:
        reason: One word for counters and tools, one of `l3store.page.REASONS`.
    """

    def __init__(self, message: str, *, reason: str = "payload") -> None:
        super().__init__(message)
        self.reason = reason


class ConsensusError(L3Error, RuntimeError):
    """Ranks disagree, or one of them is gone."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message: the nearest valid choice to `name`, and all of them.

    Example: ``; did you mean 'capacity'? Known: capacity, evict``.
    """
    choices = sorted(known)
    folded = {choice.lower(): choice for choice in choices}
    begun = [choice for choice in folded if name and choice.startswith(name.lower())]
    close = begun or difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    hint = f"; did you mean {folded[close[0]]!r}?" if close else "."
    return f"{hint} Known: {', '.join(choices) if choices else 'none'}"
