"""The S3 server in memory, for what a real one cannot be made to do: full, busy, wrong lengths."""

from __future__ import annotations

import json
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from l3store.servers.process import HOST, ServerProcess, free_ports

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Stub"]

PROGRAM = Path(__file__).parents[3] / "bench" / "s3" / "stub.py"


class Stub:
    """A running stub, empty at its start."""

    def __init__(self, folder: Path, *, capacity: int = 0) -> None:
        (self.port,) = free_ports(1)
        command = [sys.executable, str(PROGRAM), "--port", str(self.port)]
        self.process = ServerProcess(
            [*command, "--capacity", str(capacity)], folder, lambda: bool(self.asked() or True)
        )

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def url(self, prefix: str = "l3store", **options: object) -> str:
        given = {"endpoint": self.endpoint, "access_key": "a", "secret_key": "b", **options}
        return f"s3://bucket/{prefix}?{urlencode(given, safe=':/')}"

    def faults(self, *faults: dict[str, Any]) -> None:
        """From now on these go wrong; see `_told` of the stub."""
        self._tell("faults", json.dumps(faults).encode())

    def asked(self) -> dict[str, int]:
        """Returns how many requests of each kind came since the last question."""
        found: dict[str, int] = json.loads(self._tell("asked"))
        return found

    def _tell(self, what: str, body: bytes = b"") -> bytes:
        connection = HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("POST", f"/-/{what}", body)
            return connection.getresponse().read()
        finally:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
