"""Checks every page of a store, header and payload, and removes the bad ones if it is told to."""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from l3store import page
from l3store.errors import BackendUnavailable, ConfigError, IntegrityError, L3Error
from l3store.inspect.files import PageFiles, check_files
from l3store.inspect.holes import Chains, needs_every_page

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.abc import Backend, PlaceUsage
    from l3store.page import Header

__all__ = ["FOREIGN", "REASONS", "BadPage", "CheckResult", "PlaceCheck", "check_store"]

FOREIGN = "foreign"
REASONS = page.REASONS | {FOREIGN: "stands under a page's name but is no page: a link, a folder"}
"""Why a page is bad: the word, and its meaning."""

_BATCH_BYTES = 64 << 20
_BATCH_PAGES = 128
_DELETE_PAGES = 128


class BadPage(msgspec.Struct, frozen=True):
    """A page that must not be served."""

    key: str
    reason: str
    """One of `REASONS`."""


class PlaceCheck(msgspec.Struct, kw_only=True):
    """What was seen in one place."""

    place: str
    pages: int = 0
    """Pages checked, good and bad."""
    payload_bytes: int = 0
    """Of the good pages."""
    bad_pages: int = 0
    behind_a_hole: int | None = None
    """Good pages that no prefix reaches; None for pools that do not need every page."""


class CheckResult(msgspec.Struct, kw_only=True):
    """What was seen in the whole store."""

    url: str = ""
    pages: int = 0
    bad_pages: int = 0
    reasons: dict[str, int] = {}
    behind_a_hole: int = 0
    gone_pages: int = 0
    """Pages that were deleted or evicted between listing and reading."""
    deleted_pages: int = 0
    not_removed: list[str] = []
    """What stood under a page's name, was to be removed, and could not be, with the reason."""
    payload_bytes: int = 0
    seconds: float = 0.0
    places: list[PlaceCheck] = []
    bad: list[BadPage] = []


def check_store(
    backend: Backend,
    places: Sequence[PlaceUsage],
    *,
    remove_from: Backend | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> CheckResult:
    """Reads and checks every page of `places`. Blocks until the last one.

    Memory: at most 64 MiB of pages at once, or one page; 200 bytes for each page of the largest
    place; and the names of all bad pages.

    Args:
        backend: A bare store, as `open_to_look` gives it; it is only read.
        places: Such as ``backend.usage()``.
        remove_from: The same store, open for writing: bad pages are removed from it, each only if
            it still has the very header that was read. None: nothing is removed.
        advance: Called with 1 after each page.

    Raises:
        ConfigError: `remove_from` cannot delete.
        BackendUnavailable: The store does not answer.
    """
    if remove_from is not None and not remove_from.capabilities.delete:
        raise ConfigError("the store was opened without the right to delete, or cannot")
    result, start = CheckResult(), time.perf_counter()
    for usage in places:
        walk = _Walk(backend, usage, remove_from, result, advance)
        result.places.append(walk.run())
    result.reasons = dict(Counter(one.reason for one in result.bad).most_common())
    result.pages = sum(one.pages for one in result.places)
    result.bad_pages = len(result.bad)
    result.behind_a_hole = sum(one.behind_a_hole or 0 for one in result.places)
    result.payload_bytes = sum(one.payload_bytes for one in result.places)
    result.seconds = time.perf_counter() - start
    return result


class _Walk:
    """One place."""

    def __init__(
        self,
        backend: Backend,
        usage: PlaceUsage,
        remove_from: Backend | None,
        result: CheckResult,
        advance: Callable[[int], None],
    ) -> None:
        self._backend, self._remove_from = backend, remove_from
        self._result, self._advance = result, advance
        self._seen = PlaceCheck(place=usage.place)
        # None where the store has forgotten it: then each page is measured by its own header.
        self._length = usage.payload_bytes // usage.pages if usage.pages else None
        self._length = self._length or None
        self._chains = Chains()
        self._absent: list[str] = []
        self._to_remove: list[tuple[str, bytes | None]] = []

    def run(self) -> PlaceCheck:
        place = self._seen.place
        if isinstance(self._backend, PageFiles):
            check_files(self._backend, self._backend.scan(place), self._length, self._tell)
        else:
            self._check_by_calls()
        if self._absent:
            # Listed, but no page is there. What is listed still was not deleted meanwhile.
            listed = set(self._backend.scan(place))
            for key in self._absent:
                if key in listed:
                    self._bad(key, FOREIGN, None)
                else:
                    self._result.gone_pages += 1
        self._remove()
        if needs_every_page(place):
            self._seen.behind_a_hole = self._chains.behind_a_hole()
        return self._seen

    def _tell(self, key: str, reason: str, data: bytes | None, header: Header | None) -> None:
        self._advance(1)
        if header is not None:
            self._seen.pages += 1
            self._seen.payload_bytes += header.payload_bytes
            self._chains.add(header)
        elif reason == "absent":
            self._absent.append(key)
        else:
            self._bad(key, reason, data)

    def _bad(self, key: str, reason: str, data: bytes | None) -> None:
        self._seen.pages += 1
        self._seen.bad_pages += 1
        self._result.bad.append(BadPage(key, reason))
        self._to_remove.append((key, data))
        if len(self._to_remove) >= _DELETE_PAGES:
            self._remove()

    def _remove(self) -> None:
        todo, self._to_remove = self._to_remove, []
        if self._remove_from is None or not todo:
            return
        known = [(key, data) for key, data in todo if data is not None]
        done = self._remove_from.delete([key for key, _ in known], [data for _, data in known])
        self._result.deleted_pages += sum(done)
        for key in (key for key, data in todo if data is None):
            try:
                self._result.deleted_pages += sum(self._remove_from.delete([key]))
            except L3Error as error:  # such as a folder that is not empty: not ours to clear
                self._result.not_removed.append(f"{key}: {error}")

    # -- stores without a file a page ------------------------------------------------------

    def _check_by_calls(self) -> None:
        length, can = self._length, self._backend.capabilities
        if length is None:
            raise BackendUnavailable(
                f"the store does not tell how long the pages of {self._seen.place} are"
            )
        step = max(1, min(_BATCH_PAGES, _BATCH_BYTES // length, can.max_batch))
        keys = self._backend.scan(self._seen.place)
        while part := list(islice(keys, step)):
            headers = self._backend.headers(part) if can.headers else [None] * len(part)
            good = []
            for key, data in zip(part, headers, strict=True):
                try:
                    if data is not None:
                        page.parse_of(key, data, length)
                    good.append((key, data))
                except IntegrityError as error:
                    self._tell(key, error.reason, data, None)
            self._read(good, length)

    def _read(self, listed: Sequence[tuple[str, bytes | None]], length: int) -> None:
        keys = [key for key, _ in listed]
        buffer = memoryview(bytearray(length * len(keys)))
        into = page.frame([(buffer[at : at + length],) for at in range(0, len(buffer), length)])
        done = self._backend.page_get(keys, into)
        stored = done if all(done) else self._backend.exists_each(keys)
        for i, (key, data) in enumerate(listed):
            if done[i]:
                data = bytes(into[i][0])
                reason = page.refusal(key, into[i])
                self._tell(key, reason or "", data, None if reason else page.parse(data))
            else:
                # Stored, but not with the length that its header says.
                self._tell(key, "length" if stored[i] else "absent", data, None)
