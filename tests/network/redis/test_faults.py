"""Redis when its server or the network fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from l3store.servers.process import HOST
from l3store.testing.faults import FaultSuite

if TYPE_CHECKING:
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
