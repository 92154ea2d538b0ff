"""The peers of this benchmark, and what they read from the device."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import peer_process
from disk import Moved
from peer_process import Wheels

from l3store.replay import payload

if TYPE_CHECKING:
    from figures import Half
    from ours import Setting
    from pages import Shape

__all__ = ["PEERS", "PeerProcess"]

_DRIVERS = Path(__file__).parent / "peers"
_COMMON = Path(__file__).parents[1] / "common"


_SGLANG = Wheels(
    "sglang",
    ("sglang==0.5.23",),
    ("torch==2.13.0", "numpy", "orjson", "msgspec", "pyzmq", "psutil", "requests",
     "transformers==5.19.0", "pydantic", "dill", "openai==2.8.0", "pillow", "tqdm", "ninja",
     "pybase64", "einops", "packaging"),
)  # fmt: skip
_LMCACHE = Wheels(
    "lmcache",
    ("lmcache==0.5.6", "lmcache_rust_raw_block_io==0.5.7rc2"),
    ("torch==2.13.0", "numpy", "numba", "sortedcontainers", "prometheus_client", "py-cpuinfo",
     "psutil", "aiohttp", "pyyaml", "pyzmq", "msgspec", "requests", "cachetools",
     "opentelemetry-api", "cryptography", "aiofile", "transformers"),
)  # fmt: skip


class Driver(NamedTuple):
    """How a peer is started, and what a reader of the figures must know of it."""

    wheels: Wheels
    script: str
    kind: str
    said: str


PEERS = {
    "sglang": Driver(
        _SGLANG, "sglang_file.py", "",
        "sglang 0.5.23, HiCache backend `file`, by its cache controller's generic page calls",
    ),
    "raw_block": Driver(
        _LMCACHE, "lmcache_files.py", "raw_block",
        "LMCache 0.5.6, raw_block with io_uring of lmcache_rust_raw_block_io 0.5.7rc2, which is "
        "a pre-release; O_DIRECT, in a file that was written before",
    ),
    "fs_native": Driver(
        _LMCACHE, "lmcache_files.py", "fs_native", "LMCache 0.5.6, fs_native, 4 workers, buffered",
    ),
}  # fmt: skip


class PeerProcess(peer_process.PeerProcess):
    """One peer with files of its own, gone at its end; counts what its reads move."""

    def __init__(self, setting: Setting, name: str, shape: Shape, slots: int, batches: int) -> None:
        driver = PEERS[name]
        self._shape, self._folder = shape, setting.new_folder("peer")
        command = [
            driver.wheels.python(setting.venvs), str(_DRIVERS / driver.script),
            "--kind", driver.kind, "--dir", self._folder,
            "--page-bytes", str(shape.page_bytes), "--slots", str(slots),
            "--pages", str(batches * shape.batch), "--payload", payload.__file__,
        ]  # fmt: skip
        log = os.path.join(setting.folder, f"{name}.log")
        environment = {**os.environ, "PYTHONPATH": str(_COMMON)}
        super().__init__(name, command, log, shape.batch, environment)
        self.reads = Moved(self.pid)

    def get(self, number: int) -> Half:
        self.reads.start()
        half = super().get(number)
        self.reads.stop(self._shape.batch_bytes)
        return half

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)
