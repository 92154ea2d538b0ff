"""S3 when its server or the network fails."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar

import pytest

from l3store.servers.process import HOST
from l3store.testing.faults import FaultSuite, with_options
from l3store.testing.kit import Pages
from l3store.testing.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from l3store.servers.s3 import S3Server

_numbers = itertools.count()
# One request on one connection. Elsewhere it is sent again and arrives, or a head is hit.
_ONE_TRY = ("cut_anywhere_in_a_read", "garbage_in_place", "changed_byte")
# Where every call waits for its time-out.
_SILENT = ("frozen", "silent", "dead", "leave_no_", "many_threads", "breaker")


class _Clearing(Proxy):
    """Ends with all connections closed: how many of them a client keeps is left to chance."""

    def restore(self) -> None:
        super().restore()
        self.cut()


class TestFaults(FaultSuite):
    @pytest.fixture(autouse=True)
    def _place(self, request):
        self._prefix = next(_numbers)
        self._one_try = any(part in request.node.name for part in _ONE_TRY)
        self._silent = any(part in request.node.name for part in _SILENT)
        self._counted = "leave_no_" in request.node.name

    @pytest.fixture
    def server(self, s3_server: S3Server) -> S3Server:
        return s3_server

    @pytest.fixture
    def proxy(self, server: S3Server) -> Iterator[Proxy]:
        with (_Clearing if self._counted else Proxy)(self.address(server)) as proxy:
            yield proxy

    def address(self, server: S3Server) -> tuple[str, int]:
        return HOST, server.port

    def url(self, server: S3Server, address: tuple[str, int]) -> str:
        url = server.url.replace(f"{HOST}:{server.port}", "{}:{}".format(*address))
        url = url.replace("l3store?", f"l3store/faults-{self._prefix}?")
        # The machine may be busy: where nobody waits for it, the time-out is long.
        url = with_options(url, timeout="1s" if self._silent else "3s")
        if self._counted:  # all its threads are there from the first rounds on
            url = with_options(url, concurrency=2)
        return with_options(url, retries=0) if self._one_try else url

    @pytest.fixture
    def pages(self) -> Pages:
        count, size = (1, 600_000) if self._one_try else (6, 100_000)
        return Pages(count=count, size=size, segments=2)


@pytest.mark.soak
class TestFaultsBoto3(TestFaults):
    options: ClassVar = {"client": "boto3"}
