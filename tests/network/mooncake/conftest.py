"""One master and one owner for all tests of a file: as new at the beginning of each test.

The library's client of a process is kept when a store closes, so a new server for each test would
leave as many of them behind; here all tests of a file share one.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from l3store import registry
from l3store.servers.mooncake import MooncakeServer
from l3store.servers.mooncake_client import BareClient
from l3store.servers.process import wait_until
from tests.network.conftest import start
from tests.network.mooncake.away import ProxyAway

if TYPE_CHECKING:
    from collections.abc import Iterator

_prefixes = (f"p{n}" for n in itertools.count())
# The lease is longer than the library waits for an owner: what it reads meanwhile stays good.
SETTINGS = {"default_kv_lease_ttl": 3000, "put_start_discard_timeout_sec": 1, "client_ttl": 2}


@pytest.fixture(scope="module")
def _module() -> Iterator[MooncakeServer]:
    with ExitStack() as stack:
        yield start(stack, MooncakeServer, segment=64 << 20, settings=SETTINGS)


@pytest.fixture
def mooncake_server(_module: MooncakeServer) -> Iterator[MooncakeServer]:
    """A master that runs, and one owner whose memory is mounted."""
    yield _module
    for process in (_module.process, *_module.owners):
        if process.running:
            process.thaw()
    if not _module.running:
        _module.restart()
    _module.owners[:] = [owner for owner in _module.owners if owner.running]
    if not _module.owners:
        _module.add_owner()
    mounted(_module)


def mounted(server: MooncakeServer) -> None:
    """Waits until exactly the memory of the living owners is there."""
    living = sum(owner.running for owner in server.owners)
    wait_until(lambda: len(server.segments()) == living, "memory is mounted")


@pytest.fixture(scope="module")
def _away(_module: MooncakeServer) -> Iterator[ProxyAway]:
    proxy = ProxyAway(_module.port)
    yield proxy
    proxy.close()


@pytest.fixture
def mooncake_proxy(_away: ProxyAway) -> Iterator[ProxyAway]:
    """Between a store and the master; the pages themselves travel past it."""
    yield _away
    _away.restore()


@pytest.fixture
def url(mooncake_server: MooncakeServer) -> str:
    """An empty store."""
    return f"{mooncake_server.url}&timeout=500ms&prefix={next(_prefixes)}"


@pytest.fixture
def raw(url: str) -> Iterator[registry.Backend]:
    """The bare backend."""
    with registry.open(url, raw=True) as backend:
        yield backend


@pytest.fixture
def bare(mooncake_server: MooncakeServer) -> BareClient:
    """Another program's client; the same one for all tests of a file."""
    if not hasattr(mooncake_server, "bare"):
        mooncake_server.bare = BareClient(mooncake_server.port)
    # Each use of a connection that an earlier master has left behind fails once.
    wait_until(lambda: mooncake_server.bare.store.is_exist("x") >= 0, "the master answers it")
    return mooncake_server.bare
