"""Checks the pages of a store that keeps one file a page: many small files at once, by aiofiles."""

from __future__ import annotations

import asyncio
import os
import stat
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import aiofiles
from xxhash import xxh3_64

from l3store import page
from l3store.errors import BackendUnavailable, IntegrityError, L3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from l3store.page import Header

__all__ = ["PageFiles", "check_files"]

_AT_ONCE = 16
_CHUNK = 1 << 20


@runtime_checkable
class PageFiles(Protocol):
    """A backend that keeps one file a page."""

    def open_page(self, key: str) -> int | None:
        """Returns a descriptor that reads as the page's segments; None: no file of that name."""


def check_files(
    store: PageFiles,
    keys: Iterable[str],
    length: int | None,
    tell: Callable[[str, str, bytes | None, Header | None], None],
) -> None:
    """Checks the pages `keys`, 16 files at once; memory: at most 16 MiB, whatever a page's size.

    Args:
        store: An open store.
        keys: Of one place.
        length: Payload bytes of the place's pages, None where unknown.
        tell: Called in this thread for each key with (key, reason, header bytes, header): reason
            is "" for a good page, "absent", or one of `l3store.page.REASONS`.

    Raises:
        BackendUnavailable: A file cannot be opened or read.
    """
    failed = asyncio.run(_check(store, keys, length, tell))
    if isinstance(failed, OSError) and not isinstance(failed, L3Error):
        raise BackendUnavailable(f"a page cannot be read: {failed}") from failed
    if failed is not None:
        raise failed


async def _check(
    store: PageFiles,
    keys: Iterable[str],
    length: int | None,
    tell: Callable[[str, str, bytes | None, Header | None], None],
) -> Exception | None:
    todo = iter(keys)
    failed: list[Exception] = []

    async def work() -> None:
        for key in todo:  # shared: each task takes the next one
            if failed:
                return  # by itself: a task that is cancelled in an open leaks the file
            try:
                tell(key, *await _check_file(store, key, length))
            except Exception as error:
                failed.append(error)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_AT_ONCE):
            tasks.create_task(work())
    return failed[0] if failed else None


async def _check_file(
    store: PageFiles, key: str, length: int | None
) -> tuple[str, bytes | None, Header | None]:
    file = await asyncio.to_thread(store.open_page, key)
    if file is None:
        return "absent", None, None
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        return "absent", None, None
    data = b""
    async with aiofiles.open(file, "rb", buffering=0) as stream:
        try:
            # One read for the header and, of most pages, the whole payload.
            first = await stream.read(_CHUNK)
            data = first[: page.HEADER_BYTES]
            header = page.parse_of(key, data, max(found.st_size - page.HEADER_BYTES, 0))
            if length is not None and header.payload_bytes != length:
                return "length", data, None
            state = xxh3_64(memoryview(first)[page.HEADER_BYTES :])
            left = found.st_size - len(first)
            while left > 0 and (chunk := await stream.read(_CHUNK)):
                state.update(chunk)
                left -= len(chunk)
        except IntegrityError as error:
            return error.reason, data, None
    good = state.intdigest() == header.payload_sum
    return ("", data, header) if good else ("payload", data, None)
