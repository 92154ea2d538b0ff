"""``redis://``, ``rediss://`` and ``unix://``: pages in Valkey or Redis, one string each.

redis-py opens connections (AUTH, TLS, sentinels, the map of a cluster: `links`, `servers`); then
the bytes of all requests and replies are moved here (`wire`, and `pages` for pages: straight
between the socket and the caller's memory). `store` spreads a batch over servers and connections;
`transfer` moves batches of pages; `opening` judges what is there. `names` says what is called how.
docs/backends/redis.md tells sizing, eviction, and what happens in failures.
"""

from __future__ import annotations

try:
    import redis as _redis  # noqa: F401
except ImportError as error:
    raise ImportError("redis is not installed: pip install 'l3store[redis]'") from error

from l3store.backends.redis.backend import RedisBackend
from l3store.backends.redis.options import RedisOptions

__all__ = ["RedisBackend", "RedisOptions"]
