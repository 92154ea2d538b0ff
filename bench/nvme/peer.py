"""A peer in a process of its own, in an environment of its own, made from its published wheels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from disk import Moved
from figures import Half

from l3store.replay import payload

if TYPE_CHECKING:
    from ours import Setting
    from pages import Shape

__all__ = ["PEERS", "PeerProcess", "Wheels"]

_DRIVERS = Path(__file__).parent / "peers"
_COMMON = Path(__file__).parents[1] / "common"


class Wheels(NamedTuple):
    """What an environment holds."""

    name: str
    alone: tuple[str, ...]
    """Installed without what they ask for: most of that is for GPUs."""
    beside: tuple[str, ...]
    """What they import."""

    def python(self, venvs: str) -> str:
        """Returns the interpreter of the environment, which is made when it is not there."""
        folder = Path(venvs) / self.name
        ready, wanted = folder / "ready", "\n".join([*self.beside, *self.alone])
        python = folder / "bin" / "python"
        if ready.is_file() and ready.read_text(encoding="utf-8") == wanted:
            return str(python)
        print(f"making {folder}: {', '.join(self.alone)}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in ([*install, *self.beside], [*install, "--no-deps", *self.alone]):
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise SystemExit(f"{' '.join(command)}\n{made.stderr}")
        ready.write_text(wanted, encoding="utf-8")
        return str(python)


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
        _LMCACHE, "lmcache_l2.py", "raw_block",
        "LMCache 0.5.6, raw_block with io_uring of lmcache_rust_raw_block_io 0.5.7rc2, which is "
        "a pre-release; O_DIRECT, in a file that was written before",
    ),
    "fs_native": Driver(
        _LMCACHE, "lmcache_l2.py", "fs_native", "LMCache 0.5.6, fs_native, 4 workers, buffered",
    ),
}  # fmt: skip


class PeerProcess:
    """One peer, told what to do line by line; it times itself.

    Pages are known by number; a batch is a whole one of the shape.
    """

    def __init__(self, setting: Setting, name: str, shape: Shape, slots: int, batches: int) -> None:
        driver = PEERS[name]
        python = driver.wheels.python(setting.venvs)
        self.name, self._shape = name, shape
        self._folder = setting.new_folder("peer")
        self._log = open(os.path.join(setting.folder, f"{name}.log"), "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(_DRIVERS / driver.script), "--kind", driver.kind, "--dir", self._folder,
             "--page-bytes", str(shape.page_bytes), "--slots", str(slots),
             "--pages", str(batches * shape.batch), "--payload", payload.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, "PYTHONPATH": str(_COMMON)},
        )  # fmt: skip
        self.reads = Moved(self._process.pid)
        try:
            self._answer()
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def put(self, number: int) -> Half:
        answer = self._ask("put", number)
        if answer["done"] != self._shape.batch:
            raise SystemExit(f"{self.name} did not store a batch{self._said()}")
        return Half(answer["wall"], answer["cpu"])

    def get(self, number: int) -> Half:
        self.reads.start()
        answer = self._ask("get", number)
        self.reads.stop(self._shape.batch_bytes)
        if answer["done"] != self._shape.batch or answer["wrong"]:
            raise SystemExit(
                f"{self.name} gave {answer['done']} pages back, {answer['wrong']} with a wrong byte"
                + self._said()
            )
        return Half(answer["wall"], answer["cpu"])

    def exists(self, number: int) -> Half:
        answer = self._ask("exists", number)
        if answer["done"] != self._shape.batch:
            raise SystemExit(f"{self.name} does not know a batch that it stored{self._said()}")
        return Half(answer["wall"], answer["cpu"])

    def drop(self) -> None:
        """Takes its files out of the page cache, once the device has them."""
        self._ask("drop")

    def clear(self) -> None:
        """Removes all pages."""
        self._ask("clear")

    def close(self) -> None:
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()  # the end of its input ends it
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, what: str, number: int | None = None) -> dict[str, Any]:
        where = "" if number is None else f" {number * self._shape.batch} {self._shape.batch}"
        if self._process.stdin is None:
            raise SystemExit(f"{self.name} takes no requests")
        try:
            self._process.stdin.write(f"{what}{where}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(f"{self.name} ended{self._said()}") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise SystemExit(f"{self.name} ended{self._said()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _said(self) -> str:
        self._log.seek(0)
        return "; it said:\n" + self._log.read()[-3000:].decode(errors="replace")
