"""The Redis backend keeps the contract, on real servers."""

from __future__ import annotations

from contextlib import contextmanager
from urllib.parse import quote

import pytest
import redis

from l3store import registry
from l3store.errors import ConfigError
from l3store.servers.redis import RedisServer
from l3store.testing.backend import BackendSuite
from l3store.testing.kit import Pages
from l3store.testing.plugin import NotHere


@pytest.fixture(scope="module")
def server():
    try:
        with RedisServer() as server:
            yield server
    except ConfigError as error:
        raise NotHere(str(error)) from error


class _Redis:
    @pytest.fixture(autouse=True)
    def _server(self, server):
        self._at = server
        self._small = []
        # By the unix socket: it is there while TCP is not, too.
        with redis.Redis(unix_socket_path=server.unix_path, protocol=2) as self._client:
            yield
            self._client.flushall()
        for small in self._small:
            small.stop()

    def _name(self, backend, key):
        return f"{backend._names.pages(['k'])[0].decode()[:-1]}{key}"

    def raw_read(self, backend, key):
        return self._client.get(self._name(backend, key))

    def raw_write(self, backend, key, data):
        self._client.set(self._name(backend, key), data)


class TestRedis(_Redis, BackendSuite):
    policy, ttl = "noeviction", 0

    def url(self, tmp_path):
        return f"{self._at.url}?prefix={quote(str(tmp_path))}:"

    def small_url(self, tmp_path, page_bytes, pages):
        """A server whose memory is full with so many pages, beside what it needs for itself."""
        small = RedisServer(policy=self.policy)
        self._small.append(small)
        url = f"{small.url}?window={page_bytes}&ttl={self.ttl}"
        with registry.open(url) as warm:  # what a server makes for its first clients stays
            some = Pages(count=2, size=page_bytes - 128)
            warm.page_set(some.keys, some.sealed())
        small.command("FLUSHALL")
        used = small.info("memory")["used_memory"]
        small.command("CONFIG", "SET", "maxmemory", used + (pages + 2) * (page_bytes + 512))
        return url

    @contextmanager
    def unreachable(self, backend):
        """Nobody listens there any more, and all connections are closed; the pages stay."""
        self._client.config_set("port", 0)
        self._client.client_kill_filter(_type="normal", skipme=True)
        try:
            yield
        finally:
            self._client.config_set("port", self._at.port)
