"""Which pages are stored: one round trip where they are there, or not, in long runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.backends.redis.requests import each, listing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.backends.redis.store import Store

__all__ = ["stored"]

_GROUP = 128  # names that one EXISTS counts, on a server alone


def stored(store: Store, names: Sequence[bytes]) -> list[bool]:
    """Returns for each name whether it is there; blocks for a round trip, at most two.

    A server alone counts groups of names, which takes it a quarter of the time of asking for each;
    only groups that are there in part are then asked for one by one. So the end of a chain costs a
    second trip. In a cluster the names of one request must lie together, so each is asked for.
    """
    if not store.servers.alone:
        return _one_by_one(store, names)
    groups = [names[at : at + _GROUP] for at in range(0, len(names), _GROUP)]
    counts = store.numbers(
        [group[0] for group in groups], [listing(b"EXISTS", group) for group in groups]
    )
    unclear = [
        name
        for group, count in zip(groups, counts, strict=True)
        if 0 < count < len(group)
        for name in group
    ]
    answers = iter(_one_by_one(store, unclear) if unclear else ())
    found: list[bool] = []
    for group, count in zip(groups, counts, strict=True):
        if 0 < count < len(group):
            found += [next(answers) for _ in group]
        else:
            found += [count > 0] * len(group)
    return found


def _one_by_one(store: Store, names: Sequence[bytes]) -> list[bool]:
    return [count > 0 for count in store.numbers(names, each((b"EXISTS",), names))]
