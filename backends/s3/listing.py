"""What is stored, by LIST: for tools. A large store is listed from many places at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.abc import PlaceUsage
from l3store.page import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from l3store.backends.s3.client import Stat
    from l3store.backends.s3.names import Names

__all__ = ["Asked", "pages", "total"]

Asked = tuple[str, str]
"""A prefix, and the token to go on with; "": from the start."""

_AT_ONCE = 16  # lists


def pages(
    names: Names,
    place: str | None,
    listed: Callable[[Sequence[Asked]], list[tuple[list[Stat], str]]],
) -> Iterator[tuple[str, int]]:
    """Yields (key, bytes) of all pages, or of one place; foreign objects are passed over.

    Args:
        names: How objects are called.
        place: None: all.
        listed: Asks for one part of each of several lists, at once.
    """
    # Most stores, or what is left of them, fit in one answer: 256 lists would be a waste.
    wanted = "" if place is None else f"{place}/"
    ((found, token),) = listed([(names.root, "")])
    first = dict(_keys(names, found, wanted))
    yield from first.items()
    if not token:
        return
    # Anew from the start: not all servers list in the order of names, so no name says how far.
    lists: list[Asked] = [(fan, "") for fan in names.fans(place)]
    while lists:
        now, lists = lists[:_AT_ONCE], lists[_AT_ONCE:]
        again: list[Asked] = []
        for (fan, _), (found, token) in zip(now, listed(now), strict=True):
            yield from (pair for pair in _keys(names, found, wanted) if pair[0] not in first)
            if token:
                again.append((fan, token))
        lists = again + lists


def _keys(names: Names, found: Sequence[Stat], wanted: str) -> Iterator[tuple[str, int]]:
    for stat in found:
        key = names.key(stat.name)
        if key is not None and key.startswith(wanted):
            yield key, stat.size


def total(found: Iterator[tuple[str, int]]) -> list[PlaceUsage]:
    """Returns what each place holds, sorted, of keys and sizes as they are in the store."""
    sums: dict[str, tuple[int, int, int]] = {}
    for key, size in found:
        place = key.rpartition("/")[0]
        count, payload, stored = sums.get(place, (0, 0, 0))
        sums[place] = count + 1, payload + max(size - HEADER_BYTES, 0), stored + size
    return [PlaceUsage(place, *sums[place]) for place in sorted(sums)]
