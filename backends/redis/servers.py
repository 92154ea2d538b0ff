"""Which server has a key: one server, the master that sentinels name, or the nodes of a cluster."""

from __future__ import annotations

import abc
import importlib
import time
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from redis.crc import key_slot

from l3store.backends.redis.links import KINDS, MOST, SENTINEL_KINDS, Link, arguments
from l3store.backends.redis.looking import Looking, Sentinels
from l3store.backends.redis.refusals import FAULTS
from l3store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.backends.redis.options import RedisOptions
    from l3store.config import StoreURL

__all__ = ["Servers", "connect"]

_PORT, _SENTINEL_PORT = 6379, 26379
_LOOK = 1.0  # seconds at least between two looks for another server in the place of a silent one
_Address = tuple[str, int]
_Part = tuple["Link", "Sequence[int]"]


class Servers(abc.ABC):
    """The servers of a store. Thread-safe."""

    alone: ClassVar[bool] = True
    """One request may name several keys."""

    def __init__(self, name: str) -> None:
        self.name = name
        """For messages: no password, no options."""

    @abc.abstractmethod
    def masters(self) -> list[Link]:
        """Returns the servers that hold the store between them."""

    @abc.abstractmethod
    def split(
        self, names: Sequence[bytes], which: Sequence[int]
    ) -> list[tuple[Link, Sequence[int]]]:
        """Returns which of `names` (their positions `which`) lie on which server."""

    def one(self, name: bytes) -> Link:
        """Returns the server of one name."""
        return self.split((name,), (0,))[0][0]

    @abc.abstractmethod
    def at(self, address: _Address) -> Link:
        """Returns the server at an address that another server named."""

    @abc.abstractmethod
    def refresh(self) -> None:
        """Looks anew who has what; blocks for a few requests."""

    @abc.abstractmethod
    def suspect(self) -> None:
        """Takes note that a server did not answer: another one may have its place by now."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes all connections."""


class _One(Servers):
    """A server alone, or the master that sentinels name when a connection is opened."""

    def __init__(self, name: str, link: Link, sentinels: Sentinels | None = None) -> None:
        super().__init__(name)
        self._link, self._sentinels = link, sentinels

    def masters(self) -> list[Link]:
        return [self._link]

    def split(
        self, names: Sequence[bytes], which: Sequence[int]
    ) -> list[tuple[Link, Sequence[int]]]:
        return [(self._link, which)] if which else []

    def at(self, address: _Address) -> Link:
        return self._link

    def refresh(self) -> None:
        self._link.drop_idle()

    def suspect(self) -> None:
        """Its connections tell by themselves, and connect anew."""

    def close(self) -> None:
        self._link.close()
        if self._sentinels is not None:
            self._sentinels.close()


class _Cluster(Servers):
    """The masters of a cluster; redis-py knows who has which slot."""

    alone = False

    def __init__(self, url: StoreURL, options: RedisOptions, addresses: Sequence[_Address]) -> None:
        super().__init__(str(url))
        cluster: Any = importlib.import_module("redis.cluster")  # slow, and few need it
        self._kind, self._timeout = KINDS[url.scheme], float(options.timeout)
        self._given = arguments(url, options)
        tls = {"ssl": True} if url.scheme == "rediss" else {}
        self._topology: Any = cluster.RedisCluster(
            startup_nodes=[cluster.ClusterNode(*address) for address in addresses],
            require_full_coverage=False,
            **(self._given | tls),
        )
        self._suspected, self._looked_at = False, time.monotonic()
        self._lock = Lock()
        self._links: dict[_Address, Link] = {}
        self._looking = Looking(self._topology.nodes_manager.initialize)

    def masters(self) -> list[Link]:
        return [self.at((node.host, node.port)) for node in self._topology.get_primaries()]

    def split(
        self, names: Sequence[bytes], which: Sequence[int]
    ) -> list[tuple[Link, Sequence[int]]]:
        if self._suspected and time.monotonic() - self._looked_at > _LOOK:
            with suppress(*FAULTS):  # what is known will do, or the call fails on it
                self.refresh()
        slots = self._topology.nodes_manager.slots_cache
        found: dict[_Address, list[int]] = {}
        for i in which:
            nodes = slots.get(key_slot(names[i]))
            if not nodes:
                raise ConnectionError("no server has one of the slots: is a node gone?")
            found.setdefault((nodes[0].host, nodes[0].port), []).append(i)
        return [(self.at(address), part) for address, part in found.items()]

    def at(self, address: _Address) -> Link:
        with self._lock:
            if address not in self._links:
                host, port = address
                self._links[address] = Link.to(
                    self._kind, self._timeout, f"{host}:{port}", host=host, port=port, **self._given
                )
            return self._links[address]

    def suspect(self) -> None:
        self._suspected = True

    def refresh(self) -> None:
        self._suspected, self._looked_at = False, time.monotonic()
        self._looking.result()

    def close(self) -> None:
        self._looking.stop()
        with self._lock:
            for link in self._links.values():
                link.close()
        self._topology.close()


def connect(url: StoreURL, options: RedisOptions) -> Servers:
    """Returns the servers that a URL and its options name. Connects to a cluster alone.

    Raises:
        ConfigError: The address is none.
    """
    if url.scheme == "unix":
        if not url.path.strip("/") or url.host:
            raise ConfigError(f"{url} names no socket, such as unix:///run/valkey.sock")
        if options.cluster == "yes" or options.sentinel or options.nodes:
            raise ConfigError(
                "options 'cluster', 'sentinel' and 'nodes' are for redis:// and rediss://"
            )
        given = arguments(url, options)
        kind = KINDS[url.scheme]
        return _One(
            str(url),
            Link.to(kind, options.timeout, url.path, path=url.path, db=options.db, **given),
        )
    addresses = _addresses(url, options)
    if options.cluster == "yes":
        return _Cluster(url, options, addresses)
    if options.sentinel:
        return _One(f"{url} ({options.sentinel})", *_master(url, options, addresses))
    if options.nodes:
        raise ConfigError(
            "option 'nodes' is for a cluster or for sentinels: add cluster=yes or sentinel=<master>"
        )
    host, port = addresses[0]
    link = Link.to(
        KINDS[url.scheme], options.timeout, f"{host}:{port}", host=host, port=port, db=options.db,
        **arguments(url, options),
    )  # fmt: skip
    return _One(str(url), link)


def _master(
    url: StoreURL, options: RedisOptions, addresses: Sequence[_Address]
) -> tuple[Link, Sentinels]:
    """Returns the link to a master, and its sentinels."""
    sentinel: Any = importlib.import_module("redis.sentinel")
    given = arguments(url, options)
    sentinels = Sentinels(
        options.sentinel or "",
        addresses,
        sentinel_kwargs={
            **given, "ssl": url.scheme == "rediss",
            "username": options.sentinel_username,
            "password": options.sentinel_password,
        },
    )  # fmt: skip
    pool = sentinel.SentinelConnectionPool(
        options.sentinel, sentinels, connection_class=SENTINEL_KINDS[url.scheme],
        max_connections=MOST, db=options.db, **given,
    )  # fmt: skip
    return Link(pool, options.timeout, f"master {options.sentinel}"), sentinels


def _addresses(url: StoreURL, options: RedisOptions) -> list[_Address]:
    usual = _SENTINEL_PORT if options.sentinel else _PORT
    if not url.host:
        raise ConfigError(f"{url} names no host, such as {url.scheme}://127.0.0.1:{usual}")
    found = [(url.host, url.port or usual)]
    for text in filter(None, (options.nodes or "").split(",")):
        host, colon, port = text.strip().rpartition(":")
        if not colon:
            host, port = text.strip(), str(usual)
        if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536:
            raise ConfigError(f"option 'nodes': {text!r} is no address, such as 'host:{usual}'")
        found.append((host.strip("[]"), int(port)))
    return found
