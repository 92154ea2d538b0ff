"""The backend contract: what a store must do, and what it may rely on.

A **page** is the KV cache of `page_size` consecutive tokens for one shard. It lies in host
memory as `Segments`: one or more writable, contiguous memoryviews of format ``B``. Segment 0 is
the page's 128-byte header (`l3store.page` makes and reads it); the rest is payload. A backend
moves segments as they are and never looks inside.

What an implementer may rely on: `keys` and `into`/`pages` are never mutated during the call, and
buffers are owned by the caller and reused after the call.
What an implementer must keep: the twelve promises, each a test of `l3store.testing`
(docs/write-a-backend.md lists them with their tests).
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from typing import Self

    from l3store.config import StoreURL

__all__ = [
    "META_MAX_BYTES",
    "Backend",
    "Capabilities",
    "Check",
    "PlaceUsage",
    "Segments",
    "call_deadline",
    "time_left",
]

Segments = Sequence[memoryview]
"""One page in host memory: the 128-byte header, then the payload in one or more pieces."""

Check = Callable[[int, Segments], bool]
"""`check(i, segments)`: are these the whole, undamaged bytes of page i of the call?

Thread-safe; does not block; false when anything is wrong. Made by `l3store.page.opener`.
"""

META_MAX_BYTES = 64 * 1024
"""Upper limit of one `put_meta` object, in bytes."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond the core calls. Frozen: it never changes after opening."""

    listing: bool = False
    """`scan` and `usage` work."""
    delete: bool = False
    """`delete` works."""
    headers: bool = False
    """`headers` works: page headers without reading payloads."""
    registration: bool = False
    """`register_buffer` works, and makes transfers faster or possible at all."""
    shared: bool = False
    """Several processes may use one store at once, each seeing the others' pages."""
    durable: bool = False
    """Pages outlive the process that wrote them."""
    interruptible: bool = False
    """Every call ends by itself within `time_left()`, touching no memory afterwards."""
    checks: bool = False
    """`page_get` calls `check` itself, in its own worker, as soon as a page has arrived."""
    read_only: bool = False
    """The store was opened without the right to write: `page_set` answers False."""
    late: Literal["wait", "staged"] = "staged"
    """What the wrapper `deadline` does by default with a call that cannot be interrupted."""
    alignment: int = 1
    """Bytes; segments aligned so (address and length) move without a bounce buffer."""
    max_page_bytes: int = 1 << 62
    """Largest page, header included; a larger one is a `ValueError`."""
    max_batch: int = 1 << 30
    """Most keys in one call; more is a `ValueError`."""


@dataclass(frozen=True, slots=True)
class PlaceUsage:
    """What one place (namespace, pool and shard) holds."""

    place: str
    pages: int
    payload_bytes: int
    """Payload only, without headers."""
    stored_bytes: int
    """What the pages take in the store, headers and rounding included."""


_ambient = local()


@contextmanager
def call_deadline(seconds: float) -> Iterator[None]:
    """Sets what `time_left` answers in this thread; nested scopes can only shorten it."""
    before: float | None = getattr(_ambient, "at", None)
    at = time.monotonic() + seconds
    _ambient.at = at if before is None else min(at, before)
    try:
        yield
    finally:
        _ambient.at = before


def time_left() -> float | None:
    """Returns the seconds left for the running call in this thread, or None without a deadline.

    Set by the wrapper `deadline`. An interruptible backend sets its socket time-outs by it. May be
    negative: the deadline has passed.
    """
    at: float | None = getattr(_ambient, "at", None)
    return None if at is None else at - time.monotonic()


class Backend(abc.ABC):
    """A store of pages. Thread-safe: any method may be called from any thread, several at once.

    All data calls block until they are done. Absent is a plain miss; what keeps a call from
    working is a typed error of `l3store.errors`, never a bare vendor error.
    """

    capabilities: Capabilities = Capabilities()

    read_only_options: ClassVar[Mapping[str, str]] = {}
    """URL options with which opening and reading create and change nothing. Tools that only look
    add them; empty where that is so anyway."""

    @classmethod
    @abc.abstractmethod
    def from_url(cls, url: StoreURL) -> Self:
        """Opens the store that `url` names.

        Raises:
            ConfigError: An option is unknown or invalid, or the place is not a store.
            BackendUnavailable: The store does not answer.
        """

    @classmethod
    def check_url(cls, url: StoreURL) -> bool:
        """Checks what can be known of `url` without a look at the store. Does not block.

        Returns:
            Whether the options were checked; False: this backend checks them as it opens.

        Raises:
            ConfigError: As of `from_url`.
        """
        return False

    # -- the core: three calls -------------------------------------------------------------

    @abc.abstractmethod
    def batch_exists(self, keys: Sequence[str]) -> int:
        """Returns how many of `keys`, counted from the first up to the first hole, are stored.

        Raises:
            ValueError: A key is outside the grammar (`l3store.keys`), or too many keys.
            BackendUnavailable: The store does not answer.
        """

    @abc.abstractmethod
    def page_get(
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        """Reads whole pages into the caller's buffers.

        Args:
            keys: Object names; order and duplicates are honoured.
            into: One `Segments` a key; their sizes say how long the stored page must be, exactly.
            check: With ``capabilities.checks`` called for each page that arrived; without it
                ignored (the wrapper `verify` calls it after the call).

        Returns:
            One bool a key: True means every byte of header and payload was filled from that key.
            On False the buffer's content is unspecified and must not be used. A damaged page is
            False, and with ``checks`` also removed.

        Raises:
            ValueError: Lengths of `keys` and `into` differ, a key is outside the grammar, or the
                pages of a place have another length than the buffers.
            BackendUnavailable: The store does not answer; `.done` says which pages are good.
        """

    @abc.abstractmethod
    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:
        """Stores whole pages. A key is never visible with less than its whole page.

        Returns:
            One bool a key. True: stored (also when it was there already: the old page or the new
            one is kept, always one whole page). False: not stored, because the store is full or
            read-only.

        Raises:
            ValueError: Lengths differ, a key is outside the grammar, or pages of one place have
                different payload lengths.
            CapacityError: Full, and not one page of the call was stored.
            BackendUnavailable: The store does not answer; `.done` says which pages are stored.
        """

    def exists_each(self, keys: Sequence[str]) -> list[bool]:
        """Returns for each key whether it is stored.

        This default asks `batch_exists` hole by hole; override it where one trip does it.
        """
        found: list[bool] = []
        while len(found) < len(keys):
            run = self.batch_exists(keys[len(found) :])
            found += [True] * run
            if len(found) < len(keys):
                found.append(False)
        return found

    # -- small objects: descriptors of namespaces and places -------------------------------

    @abc.abstractmethod
    def put_meta(self, name: str, data: bytes) -> None:
        """Stores a small object (at most 64 KiB) under a namespace or a place; atomic, replaces.

        Raises:
            ValueError: `name` is neither a namespace nor a place, or `data` is too long.
            BackendUnavailable: The store does not answer or is read-only.
        """

    @abc.abstractmethod
    def get_meta(self, name: str) -> bytes | None:
        """Returns the small object, or None when there is none."""

    @abc.abstractmethod
    def list_meta(self) -> list[str]:
        """Returns the names of all small objects, sorted."""

    # -- by capability ---------------------------------------------------------------------

    def scan(self, place: str | None = None) -> Iterator[str]:
        """Yields the keys of one place, or of all; pages set or deleted meanwhile may be missed.

        Capability `listing`.
        """
        raise self._lacks("scan", "listing")

    def usage(self) -> list[PlaceUsage]:
        """Returns what each place holds, sorted by place. Capability `listing`."""
        raise self._lacks("usage", "listing")

    def delete(
        self, keys: Sequence[str], headers: Sequence[bytes | None] | None = None
    ) -> list[bool]:
        """Removes pages. Capability `delete`.

        Args:
            keys: Object names.
            headers: With a 128-byte header for key i the page is removed only if its stored header
                is that one: a page that was replaced since it was read stays. None: whatever.

        Returns:
            One bool a key: True when a page was removed.
        """
        raise self._lacks("delete", "delete")

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the stored 128-byte headers, None where absent; reads no payload.

        Not verified (see `l3store.page.parse`). Capability `headers`.
        """
        raise self._lacks("headers", "headers")

    def register_buffer(self, buffer: memoryview) -> None:
        """Announces a long-lived host buffer that pages will be moved from and into.

        The backend keeps a reference until `close`. Capability `registration`.
        """
        raise self._lacks("register_buffer", "registration")

    # -- always ----------------------------------------------------------------------------

    @abc.abstractmethod
    def health(self) -> None:
        """Returns when the store answers a write and a read, or raises why it does not.

        Raises:
            BackendUnavailable: The store does not answer, is closed, or (unless it was opened
                read-only) cannot be written.
        """

    def details(self) -> dict[str, str | int | float]:
        """Returns what else a person should know of this store: name and value, for tools.

        May read all that describes the pages, and no payload.

        Raises:
            BackendUnavailable: The store does not answer.
        """
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Waits for running calls up to the deadline and frees what the backend holds.

        Calls after it raise `BackendUnavailable`; a second `close` is a no-op.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lacks(self, method: str, capability: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__}.{method}() needs the capability {capability!r}, "
            "which this backend does not declare"
        )
