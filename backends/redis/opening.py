"""Opening a store: is it ours, may we use it, and what does its server do when memory is full."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from l3store.backends.redis.refusals import Refused
from l3store.backends.redis.requests import request
from l3store.backends.redis.wire import whole
from l3store.errors import ConfigError

if TYPE_CHECKING:
    from l3store.backends.redis.names import Names
    from l3store.backends.redis.options import RedisOptions
    from l3store.backends.redis.store import Store
    from l3store.backends.redis.wire import Wire

__all__ = ["FORMAT", "KIND", "MARKER", "UNKNOWN", "Limits", "info", "limits_of", "open_store"]

_log = logging.getLogger(__name__)

FORMAT, KIND = 1, "redis"
_BULK = 512 << 20  # bytes of the largest value, where the server does not tell (its default)
UNKNOWN = "unknown"
"""What an access list keeps from us."""


class _Marker(msgspec.Struct):
    format: int
    kind: str


MARKER = msgspec.json.encode(_Marker(FORMAT, KIND))
"""What says that a prefix is a store."""


class Limits(NamedTuple):
    """What a server takes, as it said when it was asked."""

    policy: str
    """``maxmemory-policy``, or ``unknown``."""
    maxmemory: int
    """Bytes; 0: no limit, or unknown."""
    page_bytes: int
    """Largest value, so largest page."""

    @property
    def evicts(self) -> bool:
        """A page may go when another one is stored."""
        return bool(self.maxmemory) and self.policy not in ("noeviction", UNKNOWN)


def open_store(store: Store, names: Names, options: RedisOptions) -> Limits:
    """Checks that the servers answer, and that the prefix is a store of this kind and format.

    Makes the marker where it is missing and may be written.

    Raises:
        ConfigError: It is another kind or format, or nothing and read-only where nothing of ours
            is evicted.
        Refused: A server says no.
    """
    found = []
    for link in store.servers.masters():
        with link.lend() as wire:
            found.append(limits_of(wire))
    may_go = any(limits.evicts and limits.policy.startswith("allkeys") for limits in found)
    _check_marker(store, names, writable=options.mode == "rw", may_go=may_go)
    # The strictest one holds for the store as a whole.
    worst = min(found, key=lambda limits: (not limits.evicts, limits.maxmemory))
    limits = worst._replace(page_bytes=min(limits.page_bytes for limits in found))
    _warn(store.servers.name, limits, options)
    return limits


def limits_of(wire: Wire) -> Limits:
    """Asks a server for its limits; an access list may keep some of them from us."""
    maxmemory, policy, page_bytes = 0, UNKNOWN, _BULK
    try:
        for name, value in _pairs(wire.ask("CONFIG", "GET", "*max*")):
            if name == "maxmemory":
                maxmemory = whole(value)
            elif name == "maxmemory-policy":
                policy = value
            elif name == "proto-max-bulk-len":
                page_bytes = whole(value)
    except Refused:
        said = info(wire, "memory")
        maxmemory = whole(said.get("maxmemory", "0"))
        policy = said.get("maxmemory_policy", UNKNOWN)
    return Limits(policy, maxmemory, page_bytes)


def info(wire: Wire, section: str) -> dict[str, str]:
    """Returns what INFO says, {} where an access list forbids it."""
    try:
        said = wire.ask("INFO", section)
    except Refused:
        return {}
    lines = said.decode("utf-8", "replace").splitlines() if isinstance(said, bytes) else []
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _pairs(said: object) -> list[tuple[str, str]]:
    words = [str(word, "utf-8", "replace") for word in said] if isinstance(said, list) else []
    return list(zip(words[::2], words[1::2], strict=False))


def _check_marker(store: Store, names: Names, *, writable: bool, may_go: bool) -> None:
    name, text = names.marker, names.marker.decode()
    asked = [request("SET", name, MARKER, "NX")] * writable + [request("GET", name)]
    try:
        found = store.ask(name, *asked)[-1]
    except Refused as error:
        if error.code != "WRONGTYPE":
            raise
        found = b""  # no string
    if found is None and may_go:  # evicted, and its pages need not be
        _log.warning(
            "%s has no %r: it was evicted, or the store's option 'prefix' is another one",
            store.servers.name, text,
        )  # fmt: skip
        return
    if found is None:
        raise ConfigError(
            f"{store.servers.name} is no store: it has no {text!r}. Open it for writing once, or "
            "name the store's option 'prefix'"
        )
    try:
        marker = msgspec.json.decode(found if isinstance(found, bytes) else b"", type=_Marker)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{text!r} does not describe a store: {error}; "
                          "take another option 'prefix'") from error  # fmt: skip
    if (marker.kind, marker.format) != (KIND, FORMAT):
        raise ConfigError(
            f"{text!r} says kind {marker.kind!r} and format {marker.format}; this version reads "
            f"kind {KIND!r} and format {FORMAT}: take another option 'prefix', or a version of "
            "L3Store that reads it"
        )


def _warn(what: str, limits: Limits, options: RedisOptions) -> None:
    if not limits.maxmemory or options.mode == "ro":
        return
    if limits.policy == "noeviction":
        why = "it takes no more pages then"
    elif limits.policy.startswith("volatile") and not options.ttl:
        why = "it evicts only what has a time to live, and option 'ttl' is 0"
    else:
        return
    _log.warning(
        "%s is full at %d bytes and has maxmemory-policy %s: %s",
        what, limits.maxmemory, limits.policy, why,
    )  # fmt: skip
