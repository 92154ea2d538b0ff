"""How far this rank's own pools let a prefix go: what it then says as its hit.

The only rule about pools that works on local numbers. What ranks make of each other's hits is in
`meeting`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from l3store.consensus.values import SIDECARS
from l3store.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Reach", "reach"]


class Reach(NamedTuple):
    """The arguments of `FactTable.hit`, and the groups that may be reported as progress."""

    pages: int
    ends: int | None
    groups: int


def reach(kv: int, sidecars: Mapping[str, tuple[str, int | Iterable[int]]]) -> Reach:
    """Returns how far a prefix of this rank goes.

    Args:
        kv: Pages of the kv pool that are stored, contiguous from the start of the span.
        sidecars: For each pool beside it its rule, and what is stored: ``all_pages``: a count of
            contiguous pages; ``trailing_pages``: the end points, in pages from the start, before
            which its window is stored whole; ``block_groups``: a count of whole groups.

    Example:
        ``reach(10, {"indexer": ("all_pages", 7), "mamba": ("trailing_pages", [3, 5, 9])})`` is 7
        pages, of which 3 and 5 (and 0) are legal ends.

    Raises:
        ConfigError: An unknown rule; it names the pool and the nearest rule.
    """
    pages, ends, groups = kv, None, None
    for pool, (rule, stored) in sidecars.items():
        if rule == "trailing_pages" and not isinstance(stored, int):
            legal = 1
            for end in stored:
                legal |= 1 << end
            ends = legal if ends is None else ends & legal
        elif rule == "all_pages" and isinstance(stored, int):
            pages = min(pages, stored)
        elif rule == "block_groups" and isinstance(stored, int):
            groups = stored if groups is None else min(groups, stored)
        elif rule in SIDECARS:
            raise ConfigError(f"pool {pool!r}: {stored!r} is not what {rule} has stored")
        else:
            raise ConfigError(f"unknown rule {rule!r} of pool {pool!r}{nearest(rule, SIDECARS)}")
    if ends is not None:
        ends &= (2 << pages) - 1
    return Reach(pages, ends, groups or 0)
