"""Many pieces of memory in few system calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["IOV_MAX", "behind", "move_all"]

IOV_MAX = 1024
"""Pieces that one system call takes (Linux: UIO_MAXIOV)."""


def move_all(
    move: Callable[[int, Sequence[memoryview], int], int],
    file: int,
    pieces: Sequence[memoryview],
    offset: int = 0,
) -> int:
    """Moves all pieces from `offset` by `os.preadv` or `os.pwritev`; returns the bytes moved.

    Goes on after a short count until nothing moves any more, and past the limit of pieces a call.
    """
    total = 0
    for at in range(0, len(pieces), IOV_MAX):
        part = pieces[at : at + IOV_MAX]
        wanted = sum([piece.nbytes for piece in part])
        moved = move(file, part, offset + total)
        while moved < wanted:
            more = move(file, behind(part, moved), offset + total + moved)
            if not more:
                return total + moved
            moved += more
        total += moved
    return total


def behind(pieces: Sequence[memoryview], moved: int) -> list[memoryview]:
    """Returns what is left of `pieces` when the first bytes of them have moved."""
    left = list(pieces)
    while left and moved >= left[0].nbytes:
        moved -= left.pop(0).nbytes
    if moved:
        left[0] = left[0][moved:]
    return left
