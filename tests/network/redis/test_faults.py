"""Redis when its server or the network fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from l3store.servers.process import HOST
from l3store.testing.faults import FaultSuite

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.servers.certificates import Certificates
    from l3store.servers.redis import RedisServer


class TestFaults(FaultSuite):
    hasty: ClassVar = {"timeout": "300ms"}

    @pytest.fixture
    def server(self, redis_server: RedisServer) -> RedisServer:
        return redis_server

    def address(self, server: RedisServer) -> tuple[str, int]:
        return HOST, server.port

    def url(self, server: RedisServer, address: tuple[str, int]) -> str:
        return f"redis://{address[0]}:{address[1]}"


@pytest.mark.soak
class TestFaultsOverTls(TestFaults):
    plain = False

    @pytest.fixture
    def server(
        self, new_redis: Callable[..., RedisServer], certificates: Certificates
    ) -> RedisServer:
        self.ca = certificates.ca
        return new_redis(tls=certificates)

    def url(self, server: RedisServer, address: tuple[str, int]) -> str:
        return f"rediss://{address[0]}:{address[1]}?tls_ca={self.ca}"


@pytest.mark.soak
class TestFaultsOfManyConnections(TestFaults):
    plain = False
    options: ClassVar = {"connections": 3, "window": "64KiB"}
