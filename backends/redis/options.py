"""Options of ``redis://``, ``rediss://`` and ``unix://``."""

from __future__ import annotations

from typing import Literal

import msgspec

from l3store.config import Duration, Size, without_secrets
from l3store.errors import ConfigError

__all__ = ["RedisOptions"]

_LONGEST_PREFIX = 128  # characters; it stands before each key
_LONGEST = 100 * 365 * 24 * 3600  # seconds; servers and sockets take no time without end


class RedisOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of section ``redis``, whatever the scheme."""

    prefix: str = "l3:"
    """What all names begin with; other names are never listed, read or deleted."""
    mode: Literal["rw", "ro"] = "rw"
    """``ro`` creates and changes nothing."""
    db: int = 0
    """Number of the database; a URL of TCP may say it as its path."""
    username: str | None = None
    """Where the URL names none."""
    password: str | None = None
    """Where the URL has none: so it may stand in a file or the environment."""
    nodes: str | None = None
    """Further addresses ``host:port,host:port`` of sentinels or of nodes of the cluster."""
    cluster: Literal["no", "yes"] = "no"
    """The addresses are nodes of a cluster."""
    sentinel: str | None = None
    """Name of a master: the addresses are those of its sentinels."""
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    tls_ca: str | None = None
    """File of the certificates that may have signed the server's; none: those of the system."""
    tls_cert: str | None = None
    """File of this client's certificate."""
    tls_key: str | None = None
    """File of its key."""
    tls_check_hostname: Literal["yes", "no"] = "yes"
    """Whether the server's certificate must be for the name by which it is called."""
    connections: int = 1
    """Connections that one call uses at once, for each server."""
    window: Size = Size(8 << 20)
    """Bytes that are asked for, or sent, and not answered yet, for each connection."""
    connect_timeout: Duration = Duration(0.2)
    timeout: Duration = Duration(1.0)
    """Longest wait for the server to send or take a byte."""
    ttl: Duration = Duration(0.0)
    """Life of the first page of a chain since it was last read; later pages live shorter; 0: for
    ever."""

    __repr__ = without_secrets

    def __post_init__(self) -> None:
        for name in ("connections", "window", "connect_timeout", "timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"option {name!r} must be positive, not {getattr(self, name)}")
        for name in ("connect_timeout", "timeout", "ttl"):
            if getattr(self, name) > _LONGEST:
                raise ConfigError(f"option {name!r} is at most {_LONGEST // 3600}h (100 years)")
        if self.db < 0:
            raise ConfigError(f"option 'db' is a number from 0, not {self.db}")
        if not self.prefix or len(self.prefix) > _LONGEST_PREFIX or not self.prefix.isprintable():
            raise ConfigError(
                f"option 'prefix' has 1 to {_LONGEST_PREFIX} printable characters, such as 'l3:', "
                f"not {self.prefix!r}"
            )
        if self.cluster == "yes" and self.sentinel:
            raise ConfigError("options 'cluster' and 'sentinel' exclude each other: leave one out")
        if self.cluster == "yes" and self.db:
            raise ConfigError(f"a cluster has one database only: option 'db' is 0, not {self.db}")
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ConfigError(f"a client's certificate and its key go together: add {missing!r}")
