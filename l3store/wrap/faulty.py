"""Deterministic faults: the same key and seed always meet the same fault."""

from __future__ import annotations

import time
from dataclasses import replace
from threading import Event, Lock
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from l3store.errors import BackendUnavailable
from l3store.wrap._base import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.abc import Backend, Check, Segments

__all__ = ["KINDS", "Faulty"]

KINDS = {
    "miss": "page_get answers False for the page although it is stored",
    "error": "a call with the page raises BackendUnavailable before anything is done",
    "partial": "a call with the page raises BackendUnavailable; the pages before it are done",
    "delay": "a call with the page takes `delay_seconds` longer",
    "hang": "a call with the page does not go on until `release`",
    "short": "page_get fills half of the page only and calls it read",
    "flip": "page_get flips one bit of the page and calls it read",
}
"""The kinds of fault, and what each does."""


_INVERTED = bytes(255 - byte for byte in range(256))


class Faulty(Wrapper):
    """Does harm to the pages that a seed chooses, under whatever wraps it.

    Args:
        inner: The store.
        seed: Chooses the pages.
        rates: For each of `KINDS` the share of keys that meet it, 0 to 1.
        delay_seconds: Of the kind ``delay``.
        sleep: Injected by tests.

    Raises:
        ValueError: An unknown kind, or a rate outside 0 to 1.

    Declares neither `checks` (the harm is done after the inner call, the check must come after it)
    nor, with ``hang``, `interruptible`. Thread-safe.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        seed: int = 0,
        delay_seconds: float = 0.01,
        sleep: Callable[[float], None] = time.sleep,
        **rates: float,
    ) -> None:
        super().__init__(inner)
        for kind, rate in rates.items():
            if kind not in KINDS:
                raise ValueError(f"unknown fault {kind!r}; known: {', '.join(KINDS)}")
            if not 0 <= rate <= 1:
                raise ValueError(f"rate of {kind!r} must be from 0 to 1, not {rate}")
        self._seed, self._rates = seed, rates
        self._delay, self._sleep = delay_seconds, sleep
        self._released, self._lock = Event(), Lock()
        self.hanging = 0
        """Calls that hang now."""
        interruptible = inner.capabilities.interruptible and not rates.get("hang")
        self.capabilities = replace(inner.capabilities, checks=False, interruptible=interruptible)

    def release(self) -> None:
        """Lets all hanging calls go on, and none hang from now on."""
        self._released.set()

    def meets(self, kind: str, key: str) -> bool:
        """Returns whether `key` meets faults of `kind`."""
        rate = self._rates.get(kind, 0.0)
        return rate > 0 and self._number(f"{kind}/{key}") < rate * 2**64

    def _number(self, text: str) -> int:
        return xxh3_64_intdigest(text.encode(), self._seed)

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102 - as in Backend
        self._before(keys)
        return self.inner.batch_exists(keys)

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        self._before(keys)
        return self.inner.exists_each(keys)

    def page_get(  # noqa: D102
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        del check  # see the class: whoever wraps this one checks
        self._before(keys)
        end = self._partial(keys)
        done = self.inner.page_get(keys[:end], into[:end])
        for i, key in enumerate(keys[:end]):
            if not done[i]:
                continue
            if self.meets("miss", key):
                done[i] = False
            elif self.meets("short", key):
                _spoil_half(into[i])
            elif self.meets("flip", key):
                _flip(into[i], self._number(key))
        return self._finished(keys, done)

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        self._before(keys)
        end = self._partial(keys)
        return self._finished(keys, self.inner.page_set(keys[:end], pages[:end]))

    def _before(self, keys: Sequence[str]) -> None:
        if any(self.meets("delay", key) for key in keys):
            self._sleep(self._delay)
        if any(self.meets("hang", key) for key in keys):
            with self._lock:
                self.hanging += 1
            self._released.wait()
            with self._lock:
                self.hanging -= 1
        for key in keys:
            if self.meets("error", key):
                raise BackendUnavailable(
                    f"injected fault: error at {key}", done=[False] * len(keys)
                )

    def _partial(self, keys: Sequence[str]) -> int:
        return next((i for i, key in enumerate(keys) if self.meets("partial", key)), len(keys))

    def _finished(self, keys: Sequence[str], done: list[bool]) -> list[bool]:
        if len(done) == len(keys):
            return done
        raise BackendUnavailable(
            f"injected fault: partial at {keys[len(done)]}",
            done=done + [False] * (len(keys) - len(done)),
        )


def _spoil_half(segments: Segments) -> None:
    """Makes the second half other bytes than the page's, as where it never arrived."""
    total = sum(piece.nbytes for piece in segments)
    at = 0
    for piece in segments:
        keep = max(0, min(piece.nbytes, total // 2 - at))
        piece[keep:] = bytes(piece[keep:]).translate(_INVERTED)
        at += piece.nbytes


def _flip(segments: Segments, number: int) -> None:
    bit = number % (8 * sum(piece.nbytes for piece in segments))
    for piece in segments:
        if bit < 8 * piece.nbytes:
            piece[bit // 8] ^= 1 << bit % 8
            return
        bit -= 8 * piece.nbytes
