"""Real servers on 127.0.0.1, and what the fault tests of all stores are made of."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from l3store.errors import ConfigError
from l3store.servers.certificates import Certificates
from l3store.servers.redis import RedisServer
from l3store.servers.redis_groups import RedisCluster, RedisSentinel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def start(stack: ExitStack, server: Callable[..., Any], /, **options: Any) -> Any:
    """Starts a server that `stack` ends; without its program the test is skipped, or fails."""
    try:
        return stack.enter_context(server(**options))
    except ConfigError as error:
        if "is installed" in str(error) or "not installed" in str(error):
            if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
                pytest.fail(str(error))
            pytest.skip(str(error))
        raise


@pytest.fixture
def new_redis() -> Iterator[Callable[..., RedisServer]]:
    """Starts servers with the options of `RedisServer`; a twentieth of a second each."""
    with ExitStack() as stack:
        yield lambda **options: start(stack, RedisServer, **options)


@pytest.fixture
def redis_server(new_redis: Callable[..., RedisServer]) -> RedisServer:
    """An empty one with nothing special."""
    return new_redis()


@pytest.fixture(scope="module")
def redis_cluster() -> Iterator[RedisCluster]:
    with ExitStack() as stack:
        yield start(stack, RedisCluster)


@pytest.fixture
def redis_sentinel() -> Iterator[RedisSentinel]:
    with ExitStack() as stack:
        yield start(stack, RedisSentinel)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of a TLS server on 127.0.0.1, and a CA that did not sign them."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))
