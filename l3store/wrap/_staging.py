"""Private pages that a call works on when it may have to be abandoned."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from l3store.abc import Segments

__all__ = ["Staged", "Staging", "slices"]

SLICE_BYTES = 16 << 20
"""A batch is staged in slices of at most this many bytes (or one page, if that is larger)."""
_KEPT = 2  # free buffers kept for reuse
_ALIGNED = 4096


@dataclass(frozen=True, slots=True)
class Staged:
    """One buffer, cut into pages of two segments each: header, and the payload in one piece."""

    buffer: mmap.mmap
    pages: list[Segments]

    def copy_in(self, pages: Sequence[Segments]) -> None:
        """Copies whole pages into the staging pages."""
        for staged, page in zip(self.pages, pages, strict=True):
            for ours, theirs in _pieces(staged, page):
                ours[:] = theirs

    def copy_out(self, pages: Sequence[Segments], done: Sequence[bool]) -> None:
        """Copies those staging pages that are `done` into the caller's."""
        for staged, page, good in zip(self.pages, pages, done, strict=False):
            if good:
                for ours, theirs in _pieces(staged, page):
                    theirs[:] = ours


class Staging:
    """Hands out staging pages and keeps a few free buffers. Thread-safe.

    A buffer whose call was abandoned is not given back: the call holds it, and it is freed when the
    call has returned.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[mmap.mmap] = []

    def take(self, pages: Sequence[Segments]) -> Staged:
        """Returns staging pages of the sizes of `pages`, payloads aligned to 4096 bytes."""
        sizes = [(page[0].nbytes, sum(piece.nbytes for piece in page[1:])) for page in pages]
        headers = -(-sum(header for header, _ in sizes) // _ALIGNED) * _ALIGNED
        total = max(headers + sum(_rounded(payload) for _, payload in sizes), _ALIGNED)
        buffer = self._buffer(max(total, SLICE_BYTES + (1 << 20)))
        view, at, header_at = memoryview(buffer), headers, 0
        staged: list[Segments] = []
        for header, payload in sizes:
            staged.append((view[header_at : header_at + header], view[at : at + payload]))
            header_at += header
            at += _rounded(payload)
        return Staged(buffer, staged)

    def give_back(self, staged: Staged) -> None:
        """Takes back pages whose call has returned."""
        with self._lock:
            if len(self._free) < _KEPT:
                self._free.append(staged.buffer)

    def _buffer(self, size: int) -> mmap.mmap:
        with self._lock:
            for i, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(i)
        return mmap.mmap(-1, size)


def slices(pages: Sequence[Segments]) -> list[range]:
    """Cuts a batch into runs of at most `SLICE_BYTES`."""
    runs, start, size = [], 0, 0
    for i, page in enumerate(pages):
        page_size = sum([piece.nbytes for piece in page])
        if i > start and size + page_size > SLICE_BYTES:
            runs.append(range(start, i))
            start, size = i, 0
        size += page_size
    if start < len(pages):
        runs.append(range(start, len(pages)))
    return runs


def _pieces(staged: Segments, page: Segments) -> Iterator[tuple[memoryview, memoryview]]:
    """Pairs equal stretches of a staging page and of a caller's page."""
    yield staged[0], page[0]
    at = 0
    for piece in page[1:]:
        yield staged[1][at : at + piece.nbytes], piece
        at += piece.nbytes


def _rounded(size: int) -> int:
    # Small pages gain nothing from alignment, and a million of them would each take a block.
    step = _ALIGNED if size >= _ALIGNED else 64
    return -(-size // step) * step
