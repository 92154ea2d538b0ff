"""The servers of this benchmark: the stub in a process of its own, and a real one."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from l3store.servers.process import HOST, ServerProcess, free_ports
from l3store.servers.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Where", "asked", "clear", "seaweedfs", "stub"]


class Where(NamedTuple):
    """A server and who asks."""

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str

    @property
    def url(self) -> str:
        return (
            f"s3://{self.bucket}/l3?endpoint={self.endpoint}&access_key={self.access_key}"
            f"&secret_key={self.secret_key}"
        )


@contextmanager
def stub(folder: str) -> Iterator[Where]:
    """Starts an empty stub."""
    (port,) = free_ports(1)
    where = Where(f"http://{HOST}:{port}", "bucket", "a", "b")
    command = [sys.executable, str(Path(__file__).with_name("stub.py")), "--port", str(port)]
    process = ServerProcess(command, Path(folder), lambda: asked(where) is not None)
    try:
        yield where
    finally:
        process.kill()


@contextmanager
def seaweedfs(folder: str) -> Iterator[Where]:
    """Starts an empty SeaweedFS."""
    with S3Server(Path(mkdtemp(prefix="seaweedfs-", dir=folder))) as server:
        yield Where(server.endpoint, server.bucket, server.access_key, server.secret_key)


def asked(where: Where) -> dict[str, int]:
    """Returns how many requests of each kind the stub has had since the last question."""
    found: dict[str, int] = json.loads(_told(where, "asked"))
    return found


def clear(where: Where) -> None:
    """Empties the stub."""
    _told(where, "clear")


def _told(where: Where, what: str) -> bytes:
    parts = urlsplit(where.endpoint)
    connection = HTTPConnection(parts.hostname or HOST, parts.port, timeout=30)
    try:
        connection.request("POST", f"/-/{what}")
        return connection.getresponse().read()
    finally:
        connection.close()
