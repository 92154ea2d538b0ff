"""Where pages lie in memory, and which of it the library was told of.

Over tcp the library moves any memory. Over RDMA a device moves it, which can reach only memory that
was registered with it; what was not goes through memory of ours that was.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right, insort
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

from l3store.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from l3store.abc import Segments

__all__ = ["Copies", "Registered", "Scratch", "address_of", "addresses", "spread"]

_SCRATCH = 1 << 20  # bytes of one piece of memory for small objects and headers
_KEPT = 4  # free pieces for copies of pages
_byte = ctypes.c_char
_from_buffer, _addressof = _byte.from_buffer, ctypes.addressof


class _Buffer(ctypes.Structure):
    """The beginning of CPython's ``Py_buffer`` (80 bytes on 64-bit machines)."""

    _fields_ = (("buf", ctypes.c_void_p), ("rest", ctypes.c_char * 88))


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes, _get.restype = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int], ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes, _release.restype = [ctypes.c_void_p], None


def address_of(piece: memoryview) -> int:
    """Returns where a contiguous piece begins; it may be read-only. About 2.5 us."""
    view = _Buffer()
    _get(piece, ctypes.addressof(view), 0)
    try:
        return int(view.buf or 0)
    finally:
        _release(ctypes.addressof(view))


def addresses(pieces: Sequence[memoryview]) -> list[int]:
    """Returns where pieces begin; 0.5 us each where all of them may be written."""
    try:
        return [_addressof(_from_buffer(piece)) for piece in pieces]
    except (TypeError, ValueError):  # one is read-only, or empty
        return [address_of(piece) for piece in pieces]


class Registered:
    """The memory that one client of the library was told of. Thread-safe.

    Args:
        store: The library's client.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = Lock()
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._held: dict[int, tuple[object, int]] = {}  # start -> what holds it, how many asked

    def add(self, buffer: memoryview) -> int:
        """Registers a buffer that stays where it is; returns where it begins.

        Raises:
            ConfigError: The library refuses it, or it overlaps another one.
            ValueError: It is empty, or lies in pieces.
        """
        if not buffer.contiguous or not buffer.nbytes:
            raise ValueError(
                f"{buffer.nbytes} bytes of {buffer!r} cannot be registered: a buffer "
                "must be contiguous and not empty"
            )
        start, size = address_of(buffer), buffer.nbytes
        with self._lock:
            holder, count = self._held.get(start, (buffer, 0))
            if count and self._ends[start] == start + size:
                self._held[start] = holder, count + 1
                return start
            if (code := self._store.register_buffer(start, size)) != 0:
                raise ConfigError(
                    f"{size} bytes at {start:#x} cannot be registered ({code}): they overlap "
                    "memory that is, or exceed the memory that may be locked (ulimit -l)"
                )
            starts = self._starts.copy()  # `covers` may be reading it
            insort(starts, start)
            self._starts = starts
            self._ends[start], self._held[start] = start + size, (buffer, 1)
            return start

    def remove(self, start: int) -> None:
        """Forgets a buffer once all who registered it have said so."""
        with self._lock:
            holder, count = self._held[start]
            if count > 1:
                self._held[start] = holder, count - 1
                return
            self._store.unregister_buffer(start)
            self._starts = [one for one in self._starts if one != start]
            del self._ends[start], self._held[start]

    def end(self) -> None:
        """Lets go of the library's client; nothing is called after it."""
        self._store = None

    def covers(self, start: int, size: int) -> bool:
        """Returns whether all these bytes lie in one registered buffer."""
        starts = self._starts
        at = bisect_right(starts, start) - 1
        return at >= 0 and start + size <= self._ends.get(starts[at], 0)


class Scratch:
    """Registered memory for small objects and headers, handed out to one call at a time."""

    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self._free: list[tuple[memoryview, int]] = []

    @contextmanager
    def piece(self) -> Iterator[tuple[memoryview, int]]:
        """Gives 1 MiB: the memory and where it begins."""
        try:
            found = self._free.pop()
        except IndexError:
            view = memoryview(mmap.mmap(-1, _SCRATCH))
            found = view, self._registered.add(view)
        try:
            yield found
        finally:
            self._free.append(found)


class Copies:
    """Stands in for memory that is not registered: registered memory, and one copy more."""

    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self._lock = Lock()
        self._free: list[memoryview] = []

    @contextmanager
    def of(self, pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
        """Gives registered pieces of the sizes of `pieces`, with whatever stands in them."""
        total = sum(piece.nbytes for piece in pieces)
        memory = self._take(total)
        at, ours = 0, []
        for piece in pieces:
            ours.append(memory[at : at + piece.nbytes])
            at += piece.nbytes
        try:
            yield ours
        finally:
            with self._lock:
                self._free.append(memory)
                spare = self._free.pop(0) if len(self._free) > _KEPT else None
            if spare is not None:
                self._registered.remove(address_of(spare))

    def _take(self, total: int) -> memoryview:
        with self._lock:
            for i, memory in enumerate(self._free):
                if memory.nbytes >= total:
                    return self._free.pop(i)
        memory = memoryview(mmap.mmap(-1, max(total, _SCRATCH)))
        try:
            self._registered.add(memory)
        except ConfigError as error:
            raise BackendUnavailable(str(error)) from error
        return memory


def spread(
    pages: Sequence[Segments], covers: Callable[[int, int], bool] | None = None
) -> tuple[list[list[int]], list[list[int]], list[tuple[int, int]]]:
    """Returns addresses and sizes of all pieces of pages, and which are not registered.

    Args:
        pages: In host memory.
        covers: Says whether so many bytes at an address are registered; None: nobody asks.

    Returns:
        A list a page, twice; and (page, piece) of each piece that is not covered.
    """
    starts = iter(addresses([piece for page in pages for piece in page]))
    sizes = [[piece.nbytes for piece in page] for page in pages]
    pointers = [[next(starts) for _ in size] for size in sizes]
    if covers is None:
        return pointers, sizes, []
    strangers = [
        (i, n)
        for i, (own, size) in enumerate(zip(pointers, sizes, strict=True))
        for n, (start, length) in enumerate(zip(own, size, strict=True))
        if not covers(start, length)
    ]
    return pointers, sizes, strangers
