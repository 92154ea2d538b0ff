"""Finds pages that no prefix reaches: a page before them is absent or bad."""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.keys import FIRST_PAGE

if TYPE_CHECKING:
    from l3store.page import Header

__all__ = ["Chains", "needs_every_page"]

_TRAILING_POOLS = frozenset({"mamba", "swa"})  # only the last pages before an end point are needed


def needs_every_page(place: str) -> bool:
    """Returns whether a hole in this place makes the pages behind it useless."""
    return place.split("/")[1] not in _TRAILING_POOLS


class Chains:
    """Collects the good pages of one place. About 200 bytes of memory a page.

    A page is known by the first 8 bytes of its hash: among ten million pages two agree with
    probability 3e-6, which here costs a wrong count and nothing else.
    """

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}

    def add(self, header: Header) -> None:
        """Takes a good page. One whose parent is unknown counts as a first page."""
        parent = header.parent
        root = parent is None or parent == FIRST_PAGE
        self._parents[_short(header.page_hash)] = None if root else _short(parent or FIRST_PAGE)

    def behind_a_hole(self) -> int:
        """Returns how many of the pages cannot be reached from a first page."""
        reached: dict[int, bool] = {}
        for start in self._parents:
            path: dict[int, None] = {}
            at: int | None = start
            while at is not None and at in self._parents and at not in reached and at not in path:
                path[at] = None
                at = self._parents[at]
            # None: a first page. A circle, which only damage can make, is reached from nowhere.
            good = at is None or reached.get(at, False)
            reached.update(dict.fromkeys(path, good))
        return sum(not good for good in reached.values())


def _short(page_hash: bytes) -> int:
    return int.from_bytes(page_hash[:8], "little")
