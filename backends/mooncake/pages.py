"""Pages in and out: multi-buffer calls on the caller's memory, header first, without a copy."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

from l3store.abc import time_left
from l3store.backends.mooncake.memory import address_of, spread
from l3store.page import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from l3store.abc import Segments
    from l3store.backends.mooncake.client import Client
    from l3store.backends.mooncake.sessions import Numbers, Sessions

    _CopyOut = Callable[[Sequence[bool]], None]

__all__ = ["ABSENT", "Got", "Pages", "Put"]

FULL, BAD_SIZE, NOT_READY, ABSENT, EXPIRED = -200, -600, -703, -704, -707
TRANSFER = -800
_MISSES = (NOT_READY, ABSENT, EXPIRED)  # EXPIRED: evicted while it was read
_EVICTION = 0.05  # seconds; a full store makes room in the background
_BUSY = 1.5  # seconds that another process's unfinished page is waited for
_PAUSE = 0.02
_HEADERS = 8  # of one call: the library asks for each by itself, and waits for each that is late


class Got(NamedTuple):
    """What a read brought."""

    done: list[bool]
    damaged: list[int]
    """Which pages are stored with another length than the buffers'."""
    failed: int
    """The library's code when something else went wrong, or 0."""


class Put(NamedTuple):
    """What a write brought."""

    done: list[bool]
    failed: int
    """The library's code when it was neither stored nor refused for lack of room, or 0."""


class Pages:
    """Moves pages between the caller's memory and the store. Thread-safe; blocks.

    Args:
        client: The library's client.
        prefix: What all names begin with.
        unregistered: What happens to memory that was not registered.
        sessions: The faster way, or None for the plain one.
    """

    def __init__(
        self,
        client: Client,
        prefix: str,
        unregistered: Literal["direct", "copy", "refuse"],
        sessions: Sessions | None,
    ) -> None:
        self._client, self._begin, self._unregistered = client, f"{prefix}/page/", unregistered
        self._sessions = sessions

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Returns which pages are stored and whole; one round trip.

        The master protects what it is asked for against eviction for its lease (10 s by default).

        Raises:
            BackendUnavailable: The store does not answer.
        """
        if not keys:
            return []
        codes = self._client.call("batch_is_exist", self._named(keys))
        if (worst := min(codes)) < 0:
            raise self._client.failed(worst, "asking for pages")
        return [code == 1 for code in codes]

    def get(self, keys: Sequence[str], into: Sequence[Segments]) -> Got:
        """Reads pages; done are those whose stored length is exactly that of the buffers."""
        rounds = _rounds(keys)
        wanted = [sum([piece.nbytes for piece in page]) for page in into]
        codes = [0] * len(keys)
        for part in rounds:  # of a name that stands twice in one call the library fills one
            pages = into if len(rounds) == 1 else [into[i] for i in part]
            with self._memory(pages, write=False) as (pointers, sizes, copy_out):
                found = self._read([keys[i] for i in part], pointers, sizes)
                copy_out([found[n] == wanted[i] for n, i in enumerate(part)])
            for i, code in zip(part, found, strict=True):
                codes[i] = code
        done = [code == size for code, size in zip(codes, wanted, strict=True)]
        if all(done):
            return Got(done, [], 0)
        damaged: list[int] = []
        for i, code in enumerate(codes):
            if done[i] or code in _MISSES:
                continue
            if code in (BAD_SIZE, TRANSFER):  # too long, too short, or its owner is gone
                size = self.size(keys[i])
                if size in (ABSENT, NOT_READY):
                    continue
                if size < 0 or size == wanted[i]:
                    return Got(done, damaged, size if size < 0 else code)
            elif code < 0:
                return Got(done, damaged, code)
            damaged.append(i)
        return Got(done, damaged, 0)

    def put(self, keys: Sequence[str], pages: Sequence[Segments]) -> Put:
        """Writes pages; done are those that are stored and whole when this returns."""
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        todo, stored, failed, refused = sorted(first.values()), set[int](), 0, False
        if self._sessions is not None:
            with self._memory([pages[i] for i in todo], write=True) as (pointers, sizes, _):
                names = self._named([keys[i] for i in todo])
                written = self._sessions.put(names, pointers, sizes)
            stored = {todo[n] for n in written.stored}
            failed, refused = written.failed, bool(written.full)
            todo = [i for i in todo if i not in stored]
            if refused:
                time.sleep(_EVICTION)
        if todo and not failed:
            left = time_left()
            if left is not None and left <= 0:  # an owner that is silent would take as long again
                failed = TRANSFER
        if todo and not failed:
            failed = self._put_plainly(keys, pages, todo, stored, refused=refused)
        there = {keys[i] for i in stored}
        return Put([key in there for key in keys], failed)

    def _put_plainly(
        self, keys: Sequence[str], pages: Sequence[Segments], todo: Sequence[int],
        stored: set[int], *, refused: bool,
    ) -> int:  # fmt: skip
        """Adds to `stored` what of `todo` is, and returns the code of what failed, or 0.

        The library calls a put of a name a success that another process has begun and not ended;
        so what was put is asked for. What is missing then is put again for a while, as is once
        what found no room: the store evicts in the background.
        """
        left, retried = time_left(), refused
        until = time.monotonic() + (_BUSY if left is None else min(_BUSY, left / 2))
        while todo:
            with self._memory([pages[i] for i in todo], write=True) as (pointers, sizes, _):
                names = self._named([keys[i] for i in todo])
                codes = self._client.call("batch_put_from_multi_buffers", names, pointers, sizes)
            failed = next((int(code) for code in codes if code not in (0, FULL)), 0)
            written = [i for i, code in zip(todo, codes, strict=True) if code == 0]
            full = [i for i, code in zip(todo, codes, strict=True) if code == FULL]
            there = self._there(keys, written)
            stored |= there
            refused = refused or bool(full)
            todo = sorted({*written, *(() if retried else full)} - there)
            if failed or (refused and retried) or time.monotonic() > until:
                break  # in a full store what is missing was pushed out again
            if todo:
                time.sleep(_EVICTION if full else _PAUSE)
            retried = retried or bool(full)
        if refused:  # what came late may have pushed out what came early
            stored &= self._there(keys, sorted(stored))
        return failed

    def _there(self, keys: Sequence[str], chosen: Sequence[int]) -> set[int]:
        found = self.exist([keys[i] for i in chosen])
        return {i for i, is_there in zip(chosen, found, strict=True) if is_there}

    def _read(self, keys: Sequence[str], pointers: Numbers, sizes: Numbers) -> list[int]:
        """Returns each page's stored bytes, all of which have arrived, or the library's code."""
        names = self._named(keys)
        plain = "batch_get_into_multi_buffers"
        if self._sessions is None:
            return list(self._client.call(plain, names, pointers, sizes))
        codes, rest = self._sessions.get(names, pointers, sizes)
        if rest:
            again = self._client.call(
                plain, [names[i] for i in rest], [pointers[i] for i in rest],
                [sizes[i] for i in rest],
            )  # fmt: skip
            codes |= dict(zip(rest, again, strict=True))
        return [codes[i] for i in range(len(names))]

    def size(self, key: str) -> int:
        """Returns a page's stored bytes, header included, or the library's negative code."""
        return int(self._client.call("get_size", f"{self._begin}{key}"))

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the first 128 bytes of pages (fewer where fewer are stored), None where absent.

        Raises:
            BackendUnavailable: The store does not answer.
        """
        found: list[bytes | None] = [None] * len(keys)
        there = [i for i, is_there in enumerate(self.exist(keys)) if is_there]
        for at in range(0, len(there), _HEADERS):
            part = there[at : at + _HEADERS]
            for i, header in zip(part, self._headers([keys[i] for i in part]), strict=True):
                found[i] = header
        return found

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Removes pages, whatever their leases; returns which there were.

        Raises:
            BackendUnavailable: The store does not answer; `.done` says which are removed.
        """
        if not keys:
            return []
        codes = self._client.call("batch_remove", self._named(keys), True)
        done = [code == 0 for code in codes]
        for code in codes:
            if code not in (0, ABSENT, NOT_READY):
                raise self._client.failed(code, "removing pages", done)
        return done

    def _headers(self, keys: Sequence[str]) -> list[bytes | None]:
        names = self._named(keys)
        with self._client.scratch.piece() as (memory, start):
            at = range(0, HEADER_BYTES * len(keys), HEADER_BYTES)
            (codes,) = self._client.call(
                "get_into_ranges", [start], [names], [[[n] for n in at]], [[[0]] * len(keys)],
                [[[HEADER_BYTES]] * len(keys)],
            )  # fmt: skip
            found: list[bytes | None] = []
            for name, n, (code,) in zip(names, at, codes, strict=True):
                if code == BAD_SIZE:  # it is shorter than a header
                    code = self._client.call("get_into", name, start + n, HEADER_BYTES)
                if code < 0 and code not in _MISSES:
                    raise self._client.failed(code, "reading headers")
                found.append(None if code < 0 else bytes(memory[n : n + min(code, HEADER_BYTES)]))
        return found

    def _named(self, keys: Sequence[str]) -> list[str]:
        begin = self._begin
        return [begin + key for key in keys]

    @contextmanager
    def _memory(
        self, pages: Sequence[Segments], *, write: bool
    ) -> Iterator[tuple[list[list[int]], list[list[int]], _CopyOut]]:
        """Gives the addresses and sizes of the pieces of pages, by way of copies where needed."""
        covers = None if self._unregistered == "direct" else self._client.registered.covers
        pointers, sizes, strangers = spread(pages, covers)
        if not strangers:
            yield pointers, sizes, _nothing_to_copy
            return
        if self._unregistered == "refuse":
            i, n = strangers[0]
            raise ValueError(
                f"segment {n} of page {i} ({sizes[i][n]} bytes at {pointers[i][n]:#x}) lies in no "
                "registered buffer: announce its memory by register_buffer"
            )
        theirs = [pages[i][n] for i, n in strangers]
        with self._client.copies.of(theirs) as ours:
            for (i, n), own, foreign in zip(strangers, ours, theirs, strict=True):
                pointers[i][n] = address_of(own)
                if write:
                    own[:] = foreign

            def copy_out(done: Sequence[bool]) -> None:
                for (i, _), own, foreign in zip(strangers, ours, theirs, strict=True):
                    if done[i]:
                        foreign[:] = own

            yield pointers, sizes, copy_out


def _rounds(keys: Sequence[str]) -> Sequence[Sequence[int]]:
    """Returns the positions of keys, so that no key stands twice in one part."""
    if len(set(keys)) == len(keys):
        return [range(len(keys))]
    parts: list[list[int]] = []
    seen: dict[str, int] = {}
    for i, key in enumerate(keys):
        n = seen[key] = seen.get(key, -1) + 1
        if n == len(parts):
            parts.append([])
        parts[n].append(i)
    return parts


def _nothing_to_copy(done: Sequence[bool]) -> None:
    pass
