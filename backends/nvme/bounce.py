"""Direct I/O for memory that is not aligned: through one aligned buffer a thread."""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING

from l3store.backends._vectors import move_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["bounced_read", "bounced_write"]

_BYTES = 1 << 20
_per_thread = threading.local()


def bounced_read(file: int, pieces: Sequence[memoryview], offset: int) -> int:
    """As `move_all(os.preadv, ...)`, with one copy; offset and total are multiples of 4096."""
    buffer, total = _buffer(), 0
    for chunk in _chunks(pieces):
        size = sum([piece.nbytes for piece in chunk])
        moved = move_all(os.preadv, file, [buffer[:size]], offset + total)
        total += moved
        if moved < size:
            break
        at = 0
        for piece in chunk:
            piece[:] = buffer[at : at + piece.nbytes]
            at += piece.nbytes
    return total


def bounced_write(file: int, pieces: Sequence[memoryview], offset: int) -> int:
    """As `move_all(os.pwritev, ...)`, with one copy; offset and total are multiples of 4096."""
    buffer, total = _buffer(), 0
    for chunk in _chunks(pieces):
        at = 0
        for piece in chunk:
            buffer[at : at + piece.nbytes] = piece
            at += piece.nbytes
        moved = move_all(os.pwritev, file, [buffer[:at]], offset + total)
        total += moved
        if moved < at:
            break
    return total


def _chunks(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cuts pieces into lists that fill the buffer exactly, but for the last."""
    chunk: list[memoryview] = []
    room = _BYTES
    for whole in pieces:
        piece = whole
        while piece.nbytes >= room:
            chunk.append(piece[:room])
            yield chunk
            piece, chunk, room = piece[room:], [], _BYTES
        if piece.nbytes:
            chunk.append(piece)
            room -= piece.nbytes
    if chunk:
        yield chunk


def _buffer() -> memoryview:
    buffer: memoryview | None = getattr(_per_thread, "buffer", None)
    if buffer is None:
        buffer = _per_thread.buffer = memoryview(mmap.mmap(-1, _BYTES))
    return buffer
