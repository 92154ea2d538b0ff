"""What `l3store stat` tells of a store beyond its pages."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from l3store.backends.nvme.format import histories
from l3store.backends.nvme.journal import COUNTERS

if TYPE_CHECKING:
    from l3store.backends.nvme.catalog import Catalog
    from l3store.backends.nvme.members import Members
    from l3store.backends.nvme.segment import Segment

__all__ = ["details"]


def details(
    catalog: Catalog, members: Members, *, segments: int, file_system: str, direct: bool
) -> dict[str, str | int | float]:
    """Returns names and values; inside the store's lock, and reads all slot tables.

    Raises:
        OSError: The store cannot be read.
    """
    pages = runs = slot_bytes = 0
    for segment in catalog.segments.values():
        with suppress(OSError):
            here, in_runs = _runs(segment)
            pages, runs = pages + here, runs + in_runs
            slot_bytes += here * segment.geometry.slot_bytes
    seen = dict.fromkeys(COUNTERS, 0)
    for journal in (*members.peers.values(), *(one.journal for one in members.mine.values())):
        for name, value in zip(COUNTERS, journal.counters(), strict=True):
            seen[name] += value
    unproved = sum(len(segment.unproved) for segment in catalog.segments.values())
    return {
        "lies on": f"{file_system or 'an unknown file system'}"
        f"{', which is memory, not a drive' if file_system in ('tmpfs', 'ramfs') else ''}",
        "moves pages": "past the page cache" if direct else "through the page cache",
        "capacity bytes": segments * catalog.segment_bytes,
        "segments": f"{len(catalog.segments)} of {segments}",
        "writers": len(members.peers) + len(members.mine),
        "mean run bytes": slot_bytes // runs if runs else 0,
        "pages a run, as read": round(seen["pages_read"] / seen["runs_read"], 1)
        if seen["runs_read"]
        else "nothing was read",
        "recycled reads": seen["recycled"],
        "damaged reads": seen["damaged"],
        "scrub": f"{unproved} pages to check since the machine went down" if unproved else "done",
    }


def _runs(segment: Segment) -> tuple[int, int]:
    """Returns (pages, runs) of a segment: neighbours that follow each other in their chain too."""
    table = segment.read_records(0, segment.geometry.slots)
    pages = runs = 0
    before: bytes | None = None
    for value, (parent, _) in zip(segment.pages, histories(table), strict=True):
        if value is not None:
            pages += 1
            runs += parent != before
        before = value
    return pages, runs
