"""One S3 server for all fault tests: each has a prefix of its own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from l3store.servers.s3 import S3Server
from tests.network.conftest import start

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[S3Server]:
    with ExitStack() as stack:
        yield start(stack, S3Server)


@pytest.fixture
def s3_server(_s3_server: S3Server) -> S3Server:
    """A running one, whatever the test before did to it; other prefixes may hold pages."""
    if not _s3_server.running:
        _s3_server.restart()
    return _s3_server
