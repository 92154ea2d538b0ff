"""LMCache's own clients as sides: each in a process and an environment of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from peer_process import PeerProcess, Wheels
from rounds import Side

from l3store.replay import payload

if TYPE_CHECKING:
    from figures import Half
    from pages import Memory

__all__ = ["LMCACHE", "PEERS", "VERSIONS", "Peer"]

LMCACHE = 8
"""Connections of either client, by its default."""
PEERS = {"resp": 0.7, "valkey": 1.0}
"""The least share of its speed that ours must have."""
VERSIONS = "LMCache 0.5.6: resp, its client in C++, and valkey, over valkey-glide-sync 2.6.0"
_WHEELS = Wheels(
    "lmcache-redis",
    ("lmcache==0.5.6",),
    ("torch==2.13.0", "numpy", "numba", "sortedcontainers", "prometheus_client", "py-cpuinfo",
     "psutil", "aiohttp", "pyyaml", "pyzmq", "msgspec", "requests", "cachetools",
     "opentelemetry-api", "cryptography", "aiofile", "transformers",
     "valkey-glide==2.6.0", "valkey-glide-sync==2.6.0"),
)  # fmt: skip
_DRIVER = Path(__file__).parent / "peers" / "lmcache_redis.py"
_COMMON = Path(__file__).parents[1] / "common"


class Peer(Side):
    """One of LMCache's clients, over TCP: neither has unix sockets."""

    def __init__(self, name: str, memory: Memory, folder: str, venvs: str, address: str) -> None:
        super().__init__(name, memory)
        shape = memory.shape
        slots = str(memory.turns * shape.batch)
        command = [
            _WHEELS.python(venvs), str(_DRIVER), "--kind", name, "--address", address,
            "--dir", folder, "--page-bytes", str(shape.page_bytes), "--slots", slots,
            "--pages", slots, "--payload", payload.__file__,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(_COMMON)}
        log = str(Path(folder, f"{name}.log"))
        self._process = PeerProcess(name, command, log, shape.batch, environment)

    def put(self, number: int) -> Half:
        return self._process.put(number)

    def get(self, number: int) -> Half:
        return self._process.get(number)

    def exists(self, number: int) -> Half:
        return self._process.exists(number)

    def close(self) -> None:
        self._process.close()
