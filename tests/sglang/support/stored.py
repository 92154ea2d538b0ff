"""What a store holds, seen and changed from outside while an engine may have it open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store import page, registry

if TYPE_CHECKING:
    from pathlib import Path

    from l3store.page import Header

__all__ = ["SMALL", "delete", "headers", "nvme"]

SMALL = "capacity=16MiB&segment=1MiB"
"""Options of an nvme store that takes little room, and holds all that a test here writes."""


def nvme(path: Path) -> str:
    """Returns the URL of a store at `path`."""
    return f"nvme://{path}?{SMALL}"


def headers(url: str) -> dict[str, Header]:
    """Returns the header of each page of the store, by key."""
    with registry.open(url) as store:
        keys = list(store.scan())
        found = zip(keys, store.headers(keys), strict=True)
        return {key: page.parse(header) for key, header in found if header is not None}


def delete(url: str, *, depth: int, shard: str = "all") -> None:
    """Deletes the pages of a shard that have `depth` pages before them: there must be some."""
    at = [
        key
        for key, header in headers(url).items()
        if header.depth == depth and key.split("/")[2] == shard
    ]
    with registry.open(url) as store:
        if not at or not all(store.delete(at)):
            raise LookupError(f"no page of shard {shard!r} at depth {depth} in {url}")
