"""Which prefixes of a chain the pools can restore together.

Pools limit a prefix in different ways (`PoolHitPolicy`): ``all_pages`` needs every page up to the
end, ``trailing_pages`` the last n before it, so that end points are a set (5 may be legal while 4
and 3 are not) and ranks intersect sets; ``block_groups`` holds a second form of whole blocks of
pages and never limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["all_pages", "block_groups", "group_hashes", "trailing_pages"]


def all_pages(present: Sequence[bool]) -> set[int]:
    """Returns the prefix lengths (pages) all of whose pages are present."""
    run = present.index(False) if False in present else len(present)
    return set(range(1, run + 1))


def trailing_pages(present: Sequence[bool], window: int) -> set[int]:
    """Returns the prefix lengths whose last `window` pages (or all, if fewer) are present."""
    found, run = set(), 0
    for length, there in enumerate(present, start=1):
        run = run + 1 if there else 0
        if run >= min(window, length):
            found.add(length)
    return found


def group_hashes(hashes: Sequence[str], block: int, group: int) -> list[str]:
    """Returns the keys of each whole block of pages: the last `group` hashes of the block."""
    return [
        value for end in range(block, len(hashes) + 1, block) for value in hashes[end - group : end]
    ]


def block_groups(present: Sequence[bool], block: int, group: int) -> int:
    """Returns how many pages the leading whole groups cover, `block` pages each."""
    run = present.index(False) if False in present else len(present)
    return run // group * block
