"""Mooncake when its master, or the way to the master, fails."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import pytest

from l3store.testing.faults import DOWN, FaultSuite, failing, get, until_well

if TYPE_CHECKING:
    from l3store.servers.mooncake import MooncakeServer
    from tests.network.mooncake.away import ProxyAway

_numbers = itertools.count()


class TestFaults(FaultSuite):
    options: ClassVar = {"timeout": "500ms"}
    # Long enough for the library to end its calls itself: each that hangs on takes a thread.
    brief: ClassVar = FaultSuite.brief | {"deadline": "2s"}

    @pytest.fixture(autouse=True)
    def _place(self):
        self._prefix = f"f{next(_numbers)}"

    @pytest.fixture
    def server(self, mooncake_server: MooncakeServer) -> MooncakeServer:
        return mooncake_server

    @pytest.fixture
    def proxy(self, mooncake_proxy: ProxyAway) -> ProxyAway:
        return mooncake_proxy

    def address(self, server: MooncakeServer) -> tuple[str, int]:
        return "127.0.0.1", server.port

    def url(self, server: MooncakeServer, address: tuple[str, int]) -> str:
        return f"mooncake://{address[0]}:{address[1]}?prefix={self._prefix}"

    # Pages travel past the proxy, straight from the owner: what is slow or cut in them is
    # in test_owner.py. What passes here is what the master says, a few hundred bytes.
    test_a_slow_network_ends_at_the_deadline_and_nothing_comes_late = None
    test_a_connection_that_is_cut_anywhere_in_a_read = None
    test_a_changed_byte_of_a_body_is_a_miss = None

    def test_a_master_that_is_cut_off_within_an_answer(self, proxy, distant, pages):
        """No wrong byte, no hang; and the next calls are well."""
        until_well(distant, pages)
        for at in (0, 1, 5, 20, 100, 300):
            proxy.cut_after(at, each=True)
            for _ in range(2):
                start = time.monotonic()
                with suppress(*DOWN):  # the library may ask again on another connection
                    get(distant, pages)
                assert time.monotonic() - start < self.longest
            proxy.restore()
            self._read_again(distant, pages)

    def test_a_master_that_answers_too_slowly_is_an_error_in_time(self, proxy, distant, pages):
        """A hundred bytes a second."""
        until_well(distant, pages)
        proxy.slow(100)
        for call in self._calls(distant, pages):
            failing(call, within=self.longest)
        proxy.restore()
        self._read_again(distant, pages)
