"""Connections of redis-py, lent to one call each, that wait no longer than the call may."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from redis.backoff import NoBackoff
from redis.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.retry import Retry
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from l3store.abc import time_left
from l3store.backends.redis.refusals import Refused
from l3store.backends.redis.wire import Wire
from l3store.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

    from l3store.backends.redis.options import RedisOptions
    from l3store.config import StoreURL

__all__ = ["KINDS", "MOST", "SENTINEL_KINDS", "Link", "arguments"]

MOST = 10_000
"""Connections to one server: as many as there are calls at once."""
_SHORTEST = 0.001  # seconds


class _Bounded:
    """Waits while connecting at most what is left of the running call.

    redis-py's own connections read these two wherever they wait.
    """

    _sock: socket.socket | None
    _socket_timeout: float
    _socket_connect_timeout: float

    @property
    def socket_timeout(self) -> float:
        return _bounded(self._socket_timeout)

    @socket_timeout.setter
    def socket_timeout(self, value: float) -> None:
        self._socket_timeout = value

    @property
    def socket_connect_timeout(self) -> float:
        return _bounded(self._socket_connect_timeout)

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, value: float) -> None:
        self._socket_connect_timeout = value

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Waits for each reply of the greeting no longer than the call may by then."""
        if self._sock is not None:
            self._sock.settimeout(self.socket_timeout)
        return super().read_response(*args, **options)  # type: ignore[misc]

    def connect(self) -> None:
        """Leaves nothing half open: redis-py would lend a connection again that owes replies."""
        try:
            super().connect()  # type: ignore[misc]  # of the connection that this is mixed into
        except BaseException:
            self.disconnect()  # type: ignore[attr-defined]
            raise


def _bounded(seconds: float) -> float:
    left = time_left()
    return seconds if left is None else max(min(seconds, left), _SHORTEST)


def _kind(of: Any) -> Any:
    return type(f"Bounded{of.__name__}", (_Bounded, of), {})


KINDS: Mapping[str, Any] = {
    "redis": _kind(Connection),
    "rediss": _kind(SSLConnection),
    "unix": _kind(UnixDomainSocketConnection),
}
"""How a scheme connects."""

SENTINEL_KINDS: Mapping[str, Any] = {
    "redis": _kind(SentinelManagedConnection),
    "rediss": _kind(SentinelManagedSSLConnection),
}
"""How a scheme connects to a master that sentinels name."""


def arguments(url: StoreURL, options: RedisOptions) -> dict[str, Any]:
    """Returns what each connection of redis-py is made with, but for its address.

    Raises:
        ConfigError: An option of TLS is for another scheme, or names no file.
    """
    for name in ("tls_ca", "tls_cert", "tls_key"):
        file = getattr(options, name)
        if file is not None and url.scheme != "rediss":
            raise ConfigError(f"option {name!r} is for rediss://, and {url} speaks no TLS")
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigError(f"option {name!r}: there is no file {file!r} that may be read")
    found: dict[str, Any] = {
        "username": url.username or options.username,
        "password": url.password or options.password,
        "socket_timeout": float(options.timeout),
        "socket_connect_timeout": float(options.connect_timeout),
        # Every server speaks it, and nothing comes unasked in it.
        "protocol": 2,
        # A second try is the caller's: he knows his deadline, and what was done.
        "retry": Retry(NoBackoff(), 0),
    }
    if url.scheme == "rediss":
        found |= {
            "ssl_ca_certs": options.tls_ca,
            "ssl_certfile": options.tls_cert,
            "ssl_keyfile": options.tls_key,
            "ssl_check_hostname": options.tls_check_hostname == "yes",
        }
    return found


class Link:
    """One server. Thread-safe.

    Args:
        pool: Makes and keeps its connections.
        timeout: Seconds, the longest wait for a byte.
        name: For messages.
    """

    def __init__(self, pool: ConnectionPool, timeout: float, name: str) -> None:
        self._pool, self._timeout = pool, timeout
        self.name = name

    @classmethod
    def to(cls, kind: Any, timeout: float, name: str, **given: Any) -> Link:
        """Returns the link to an address; connects when it is first used."""
        return cls(
            ConnectionPool(connection_class=kind, max_connections=MOST, **given), timeout, name
        )

    @contextmanager
    def lend(self) -> Iterator[Wire]:
        """Gives a connection; connects where none is idle.

        It is closed if the body raises, unless that is a server's `Refused`: the stream may be out
        of step then.
        """
        connection: Any = self._pool.get_connection()
        wire = None
        in_step = False
        try:
            wire = Wire(connection._sock, self._timeout)
            yield wire
            in_step = True
        except Refused:
            in_step = True
            raise
        finally:
            if not (in_step and wire is not None and wire.in_step()):
                connection.disconnect()
            self._pool.release(connection)

    def drop_idle(self) -> None:
        """Closes the connections that nobody uses now: the next call connects anew."""
        self._pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Closes all connections."""
        self._pool.disconnect()
