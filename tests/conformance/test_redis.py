"""The Redis backend keeps the contract, on real servers."""

from __future__ import annotations

import uuid
from contextlib import contextmanager

import pytest
import redis

from l3store import registry
from l3store.errors import ConfigError
from l3store.servers.certificates import Certificates
from l3store.servers.redis import RedisServer
from l3store.servers.redis_groups import RedisCluster
from l3store.testing.backend import BackendSuite
from l3store.testing.kit import Pages
from l3store.testing.plugin import NotHere
from l3store.testing.suite_bounds import BoundsSuite
from l3store.testing.suite_names import NamesSuite
from l3store.testing.suite_pages import PageSuite


@contextmanager
def started(make):
    try:
        with make() as server:
            yield server
    except ConfigError as error:
        raise NotHere(str(error)) from error


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A machine that does ten things at once is no fault of the backend, in no process."""
    monkeypatch.setenv("L3STORE_REDIS_TIMEOUT", "20s")
    monkeypatch.setenv("L3STORE_REDIS_CONNECT_TIMEOUT", "10s")
    monkeypatch.setenv("L3STORE_STACK_DEADLINE", "60s")


@pytest.fixture(scope="module")
def server():
    with started(RedisServer) as server:
        yield server


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    certificates = Certificates.make(tmp_path_factory.mktemp("tls"))
    with started(lambda: RedisServer(tls=certificates)) as server:
        yield server, certificates.ca


@pytest.fixture(scope="module")
def cluster():
    with started(RedisCluster) as cluster:
        yield cluster


class Raw:
    """Looks at a page by a client of its own."""

    def raw_read(self, backend, key):
        return self.client.get(backend._names.pages([key])[0])

    def raw_write(self, backend, key, data):
        self.client.set(backend._names.pages([key])[0], data)


class Alone(Raw):
    policy, ttl = "noeviction", 0

    @pytest.fixture(autouse=True)
    def _at(self, server):
        self.server, self._small = server, []
        # By the unix socket: it is there while TCP is not, too.
        with redis.Redis(unix_socket_path=server.unix_path, protocol=2) as self.client:
            yield
            self.client.flushall()
        for small in self._small:
            small.stop()

    def url(self, tmp_path):
        return f"{self.server.url}?prefix={uuid.uuid4().hex}:"

    def small_url(self, tmp_path, page_bytes, pages):
        """A server whose memory is full with so many pages, beside what it needs for itself."""
        small = RedisServer(policy=self.policy)
        self._small.append(small)
        # One page at a time: what a server holds on its way to a client is memory, too.
        url = f"{small.url}?window={page_bytes}&ttl={self.ttl}"
        with registry.open(url) as warm:  # what it makes for its first clients stays
            some = Pages(count=2, size=page_bytes - 128)
            warm.page_set(some.keys, some.sealed())
        small.command("FLUSHALL", "SYNC")  # or what was there counts as used
        used = small.info("memory")["used_memory"]
        # What is left beside the pages must do for a connection's buffers, or reading evicts.
        room = (pages + 2) * (page_bytes + 512) + (16 << 10)
        small.command("CONFIG", "SET", "maxmemory", used + room)
        return url

    @contextmanager
    def unreachable(self, backend):
        """Nobody listens there any more, and all connections are closed; the pages stay."""
        self.client.config_set("port", 0)
        self.client.client_kill_filter(_type="normal", skipme=True)
        try:
            yield
        finally:
            self.client.config_set("port", self.server.port)


class TestRedis(Alone, BackendSuite):
    pass


class TestRedisThatEvicts(Alone, BoundsSuite):
    """Only the tests in which a store is full: the others would be the same again.

    The clock of LRU ticks once a second, so only a time to live tells a server in a test which
    pages are to stay.
    """

    evicts = True
    policy, ttl = "volatile-ttl", "1h"


class TestRedisByUnixSocket(Alone, PageSuite):
    def url(self, tmp_path):
        return f"{self.server.unix_url}?prefix={uuid.uuid4().hex}:"


class TestRedisByTls(Raw, PageSuite):
    @pytest.fixture(autouse=True)
    def _at(self, secret):
        self.server, self.ca = secret
        with redis.Redis(unix_socket_path=self.server.unix_path, protocol=2) as self.client:
            yield
            self.client.flushall()

    def url(self, tmp_path):
        return f"{self.server.url}?prefix={uuid.uuid4().hex}:&tls_ca={self.ca}"


class TestRedisCluster(Raw, PageSuite, NamesSuite):
    @pytest.fixture(autouse=True)
    def _at(self, cluster):
        self.cluster = cluster
        first = cluster.nodes[0]
        with redis.RedisCluster(host="127.0.0.1", port=first.port, protocol=2) as self.client:
            yield
            self.client.flushall(target_nodes="primaries")

    def url(self, tmp_path):
        return f"{self.cluster.url}?prefix={uuid.uuid4().hex}:&cluster=yes"
