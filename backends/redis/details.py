"""What an operator asks of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.abc import PlaceUsage
from l3store.backends.redis.opening import UNKNOWN, info, limits_of
from l3store.backends.redis.requests import request
from l3store.backends.redis.wire import whole
from l3store.page import HEADER_BYTES

if TYPE_CHECKING:
    from l3store.backends.redis.store import Store

__all__ = ["of", "usage_of"]

_SUMS = {
    "used_memory": "memory used, bytes",
    "connected_clients": "connections",
    "evicted_keys": "evicted, since the server's start",
    "expired_keys": "expired, since the server's start",
    "keyspace_hits": "hits, since the server's start",
    "keyspace_misses": "misses, since the server's start",
}


def of(store: Store) -> dict[str, str | int | float]:
    """Returns what the servers say of themselves, sums over all of a cluster; blocks.

    What an access list keeps from us is ``unknown``.
    """
    versions: set[str] = set()
    policies: set[str] = set()
    sums: dict[str, int | str] = dict.fromkeys(_SUMS, 0)
    limit = 0
    masters = store.servers.masters()
    for master in masters:
        with master.lend() as wire:
            said: dict[str, str] = {}
            for section in ("server", "clients", "memory", "stats"):
                said |= info(wire, section)
            limits = limits_of(wire)
        valkey = said.get("valkey_version")
        versions.add(
            f"valkey {valkey}" if valkey else f"redis {said.get('redis_version', UNKNOWN)}"
        )
        policies.add(limits.policy)
        limit += limits.maxmemory
        for name, sum_ in sums.items():
            if name in said and isinstance(sum_, int):
                sums[name] = sum_ + whole(said[name])
            else:
                sums[name] = UNKNOWN
    return {
        "server": ", ".join(sorted(versions)),
        "servers": len(masters),
        "memory limit, bytes": UNKNOWN if UNKNOWN in policies else limit or "none",
        "maxmemory-policy": ", ".join(sorted(policies)),
        **{_SUMS[name]: value for name, value in sums.items()},
    }


def usage_of(store: Store, sample: bytes, place: str, pages: int, length: int | None) -> PlaceUsage:
    """Returns what a place holds, told by one of its pages: all have one length.

    Args:
        store: The servers.
        sample: Name of one of the pages.
        place: The place.
        pages: How many it has.
        length: Payload bytes of each; None: the sample's.
    """
    size, taken = store.replies(
        [sample] * 2, [request("STRLEN", sample), request("MEMORY", "USAGE", sample)]
    )
    if length is None:
        length = max(0, size - HEADER_BYTES) if isinstance(size, int) else 0
    least = length + HEADER_BYTES
    # Not a number where the sample has gone since, or an access list forbids MEMORY.
    stored = max(taken, least) if isinstance(taken, int) else least
    return PlaceUsage(place, pages, pages * length, pages * stored)
