"""Small objects: the marker, the lengths of places, descriptors and their names.

    <prefix>/store            what kind of store this is, and its format
    <prefix>/length/<place>   the payload bytes of the place's pages
    <prefix>/meta/<name>      a descriptor
    <prefix>/name/<number>    the name of a descriptor; the first who puts a number has it
    <prefix>/page/<key>       a page
    <prefix>/health/<random>  what `health` writes and removes

Each but a page begins with a checksum and its length, as the library neither keeps empty objects
nor says when one was replaced while it was read. They are hard-pinned (never evicted) and lie in
up to three owners' memory.
"""

from __future__ import annotations

import time
from struct import Struct
from typing import TYPE_CHECKING, TypeVar

from xxhash import xxh3_64_intdigest

from l3store.abc import META_MAX_BYTES, time_left
from l3store.backends.mooncake.library import pinned_config
from l3store.errors import BackendUnavailable, CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.backends.mooncake.client import Client

__all__ = ["Small", "framed"]

Result = TypeVar("Result")

_head = Struct("<4sIQ")
_MAGIC = b"L3SM"
_MOST = _head.size + META_MAX_BYTES
_FULL, _TOO_LARGE, _NOT_READY, _ABSENT, _EXPIRED = -200, -600, -703, -704, -707
_CONTESTED = (_NOT_READY, -601, -705)  # another process is putting it, or has just put it
_BUSY = 2.0  # seconds; an object that is being put is not readable
_PAUSE = 0.005
_EVICTION = 0.1  # seconds; a full store makes room in the background
_NAMES = 64  # numbers asked at once


class Small:
    """Puts and gets small objects under a prefix. Thread-safe; blocks for the store.

    A replaced object is unreadable for the moment in which it is written: readers wait for it. A
    process that is killed in that moment leaves it so until the master gives it up
    (``put_start_discard_timeout_sec``, 30 s), and without its old content.
    """

    def __init__(self, client: Client, prefix: str) -> None:
        self._client, self._prefix = client, prefix
        self._config = pinned_config()
        self._numbers: dict[str, int] = {}  # of names of descriptors, where they were seen last

    # -- one object ------------------------------------------------------------------------

    def get(self, name: str) -> bytes | None:
        """Returns an object, or None where there is none.

        Raises:
            BackendUnavailable: The store does not answer, or what is there is not ours.
        """
        key = f"{self._prefix}/{name}"

        def read() -> bytes | None:
            with self._client.scratch.piece() as (memory, start):
                size = self._client.call("get_into", key, start, _MOST)
                if size == _ABSENT:
                    return None
                if size in (_NOT_READY, _EXPIRED):
                    raise _Busy
                if size < 0 and size != _TOO_LARGE:
                    raise self._client.failed(size, f"reading {key!r}")
                return _unframed(memory[:size] if 0 <= size <= _MOST else memory[:0])

        return self._patiently(read, key)

    def claim(self, name: str, data: bytes) -> None:
        """Puts an object where there is none: of two processes one is first, and stays.

        Raises:
            CapacityError: There is no memory for it.
            BackendUnavailable: The store does not answer.
        """
        self._put("put_from", name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Puts an object in place of what is there; raises as `claim`."""
        self._put("upsert_from", name, data)

    def remove(self, name: str) -> None:
        """Removes an object; no error where there is none."""
        key = f"{self._prefix}/{name}"
        code = self._client.call("remove", key, True)
        if code not in (0, _ABSENT):
            raise self._client.failed(code, f"removing {key!r}")

    def _put(self, call: str, name: str, data: bytes) -> None:
        key, whole = f"{self._prefix}/{name}", framed(data)

        def write() -> None:
            with self._client.scratch.piece() as (memory, start):
                memory[: len(whole)] = whole
                code = self._client.call(call, key, start, len(whole), self._config)
            if code == _FULL:
                raise _Full
            if code in _CONTESTED:
                raise _Busy
            if code < 0:
                raise self._client.failed(code, f"writing {key!r}")

        try:
            self._patiently(write, key)
        except _Full:
            time.sleep(_EVICTION)
            try:
                self._patiently(write, key)
            except _Full:
                raise CapacityError(
                    f"Mooncake at {self._client.settings.master} has no memory for {key!r}: it is "
                    "full, or no process lends any"
                ) from None

    def _patiently(self, attempt: Callable[[], Result], key: str) -> Result:
        until = time.monotonic() + _BUSY
        while True:
            try:
                return attempt()
            except _Busy:
                left = time_left()
                if time.monotonic() > until or (left is not None and left <= _PAUSE):
                    raise BackendUnavailable(
                        f"Mooncake at {self._client.settings.master}: {key!r} is not readable: it "
                        "is being written, was left half-written by a process that was killed, or "
                        "is no object of this store"
                    ) from None
            time.sleep(_PAUSE)

    # -- descriptors -----------------------------------------------------------------------

    def put_meta(self, name: str, data: bytes) -> None:
        """Keeps a descriptor and its name."""
        self.replace(f"meta/{name}", data)
        number = self._numbers.get(name)  # it may be gone with the owners that had it
        if number is None or self.get(f"name/{number}") != name.encode():
            self._numbers[name] = self._keep_name(name)

    def get_meta(self, name: str) -> bytes | None:
        """Returns a descriptor."""
        return self.get(f"meta/{name}")

    def list_meta(self) -> list[str]:
        """Returns the names of all descriptors, sorted."""
        names = sorted({name for name in self._names().values() if name})
        there = self.exist([f"meta/{name}" for name in names])
        return [
            name
            for name, found in zip(names, there, strict=True)
            if found or self._is_being_put(f"meta/{name}")
        ]

    def _is_being_put(self, name: str) -> bool:
        key = f"{self._prefix}/{name}"
        code = self._client.call("get_size", key)
        if code < 0 and code not in (_NOT_READY, _ABSENT):
            raise self._client.failed(code, f"asking for {key!r}")
        return bool(code != _ABSENT)

    def exist(self, names: list[str]) -> list[bool]:
        """Returns which objects there are."""
        if not names:
            return []
        codes = self._client.call("batch_is_exist", [f"{self._prefix}/{name}" for name in names])
        if (worst := min(codes)) < 0:
            raise self._client.failed(worst, "asking for small objects")
        return [code == 1 for code in codes]

    def _keep_name(self, name: str) -> int:
        known = self._names()
        number = -1
        while name not in known.values():
            number = next(n for n in range(number + 1, len(known) + number + 2) if n not in known)
            self.claim(f"name/{number}", name.encode())
            known[number] = (self.get(f"name/{number}") or b"").decode()
        return next(number for number, kept in known.items() if kept == name)

    def _names(self) -> dict[int, str]:
        """All names by their numbers; one may be lost with an owner's memory, so gaps are seen."""
        found: dict[int, str] = {}
        for start in range(0, 1 << 20, _NAMES):
            there = self.exist([f"name/{n}" for n in range(start, start + _NAMES)])
            for n in (start + i for i, is_there in enumerate(there) if is_there):
                found[n] = (self.get(f"name/{n}") or b"").decode(errors="replace")
            if not any(there):
                break
        return found


class _Busy(Exception):
    """The object is being written."""


class _Full(Exception):
    """There is no memory for the object."""


def framed(data: bytes) -> bytes:
    """Returns a small object as it stands in the store."""
    return _head.pack(_MAGIC, len(data), xxh3_64_intdigest(data)) + data


def _unframed(data: memoryview) -> bytes:
    if len(data) >= _head.size:
        magic, length, checksum = _head.unpack_from(data)
        content = bytes(data[_head.size :])
        if (magic, length, checksum) == (_MAGIC, len(content), xxh3_64_intdigest(content)):
            return content
    raise _Busy  # replaced while it was read; or foreign, which stays so
