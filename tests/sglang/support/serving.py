"""`sgl.Engine` on this machine's CPU, many times over, as the tests see it.

`Nursery` starts engines, `Engine` is one: processes of its own, which engine_nursery.py forks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import engine_nursery
from engine_nursery import PAGE_SIZE, SECONDS, shared_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PAGE_SIZE", "STORED", "Answer", "Engine", "EngineError", "Nursery", "nursery", "prompt"]

# A multiple of 8. Where the engine computes another number of tokens at once, the last bits of its
# KV are others: seen, without any store.
LENGTH = 600
STORED = LENGTH // PAGE_SIZE * PAGE_SIZE
"""Tokens of a prompt that whole pages hold, and that storage can give back."""

_ADAPTER = {
    "backend_name": "l3store",
    "module_path": "l3store.adapters.sglang",
    "class_name": "L3StoreHiCache",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}


class Answer(NamedTuple):
    """What the engine said to one prompt, and where it had the prompt's KV from."""

    tokens: list[int]
    logprob: float
    """Of the first token."""
    storage: int
    """Prompt tokens whose KV came from L3."""
    device: int
    host: int

    @property
    def cached(self) -> tuple[int, int, int]:
        """The same three in one: L3, L1, L2."""
        return self.storage, self.device, self.host

    @property
    def said(self) -> tuple[list[int], float]:
        """What must not depend on where the KV came from: bit for bit."""
        return self.tokens, self.logprob


class EngineError(Exception):
    """A command failed in the engine's process."""


def prompt(number: int) -> list[int]:
    """A prompt of `LENGTH` tokens; no two numbers share a page."""
    return [(number * 31 + i * (2 * number + 1)) % 1000 + 10 for i in range(LENGTH)]


class Engine:
    """A process with an engine of its own, told what to do over a socket.

    Use it in one thread. Whatever takes longer than a minute raises `TimeoutError`.
    """

    def __init__(self, address: str, log: Path) -> None:
        self.log = log
        self._shared: set[Path] = set()
        self._killed = False
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(SECONDS)
        self._socket.connect(address)
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        self._lines.write(f"{log}\n")
        self._lines.flush()
        self.pid = int(self._lines.readline())

    def start(
        self, model: Path, extra: dict[str, Any] | None, *, tp: int = 1, pp: int = 1, **args: Any
    ) -> Engine:
        """Starts the engine; `extra` is the adapter's part of the extra config, None: no L3."""
        storage: dict[str, Any] = {}
        if extra is not None:
            storage = {
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config": _extra(extra),
            }
        self.do(
            "start", {"model_path": str(model), "tp_size": tp, "pp_size": pp, **storage, **args}
        )
        self._shared = shared_memory(_members(self.pid))
        return self

    def ask(self, *prompts: Sequence[int]) -> list[Answer]:
        """Answers prompts, all at once."""
        return [Answer(*one) for one in self.do("ask", [list(one) for one in prompts])]

    def post(self, *prompts: Sequence[int]) -> None:
        """Asks without waiting; what is asked later may be answered before."""
        self.do("post", [list(one) for one in prompts])

    def collect(self) -> list[Answer]:
        """Waits for the answers to what was posted."""
        return [Answer(*one) for one in self.do("collect")]

    def forget(self) -> None:
        """Flushes L1 and L2, once no page is on its way to L3 any more."""
        self.do("flush")

    def attach(self, extra: dict[str, Any], backend: str = "dynamic") -> None:
        """Attaches L3 at run time, ours or (by name) sglang's own.

        Not with pipeline stages: there sglang 0.5.23 deadlocks.
        """
        self.do("attach", _extra(extra), backend)

    def detach(self) -> None:
        """Detaches L3, and forgets what is in L1 and L2, too."""
        self.do("detach")
        self.forget()

    def do(self, command: str, *values: Any) -> Any:
        self._lines.write(json.dumps([command, values]) + "\n")
        self._lines.flush()
        line = self._lines.readline()
        good, value = json.loads(line) if line else (False, "the engine's process is gone")
        if not good:
            raise EngineError(f"{value}\n{self.said(4000)}")
        return value

    def said(self, tail: int = 0) -> str:
        """Returns the end of what the engine's processes wrote, in characters; 0: all of it."""
        try:
            return self.log.read_text(errors="replace")[-tail:]
        except OSError as error:
            return str(error)

    def kill(self) -> None:
        """kill -9 of all its processes; returns when they are gone, with all their locks."""
        if self._killed:
            return  # its number may be another group's by now
        self._killed = True
        shared = self._shared | shared_memory(_members(self.pid))
        with suppress(OSError):
            self._lines.close()
        self._socket.close()
        with suppress(ProcessLookupError):
            while True:
                os.killpg(self.pid, signal.SIGKILL)
                time.sleep(0.005)  # until the nursery has buried the last of them
        for file in shared:  # which sglang leaves when it is killed, and it always is
            file.unlink(missing_ok=True)


def _members(group: int) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                yield int(process.name)


def _extra(given: dict[str, Any]) -> str:
    return json.dumps({**_ADAPTER, "prefetch_threshold": PAGE_SIZE, **given})


class Nursery:
    """Starts engines, and makes the models they serve. Everything it needs is in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._engines: list[Engine] = []
        self._models: dict[int, Path] = {}
        plugins = Path(__file__).parent / "plugins"
        path = [str(plugins), *filter(None, sys.path)]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "tiny_models",  # the others take 10 s to import
            "TORCHDYNAMO_DISABLE": "1",  # compiles for half a minute what two ranks run once
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
        }
        self._program = subprocess.Popen(
            [sys.executable, "-W", "ignore", engine_nursery.__file__, str(folder / "s")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
        )  # fmt: skip
        assert self._program.stdout is not None
        if not self._program.stdout.readline():
            raise EngineError("sglang cannot be imported; see what was written above")

    def engine(self) -> Engine:
        """A process without an engine as yet."""
        log = self.folder / f"engine-{len(self._engines)}.log"
        self._engines.append(Engine(str(self.folder / "s"), log))
        return self._engines[-1]

    def model(self, seed: int = 0) -> Path:
        """The folder of a random model; another seed gives other weights of the same shape."""
        if seed not in self._models:
            path = self.folder / f"model-{seed}" / "tiny"
            maker = self.engine()
            maker.do("make_model", str(path), seed)
            maker.kill()
            self._models[seed] = path
        return self._models[seed]

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(10)


@contextmanager
def nursery() -> Iterator[Nursery]:
    """Starts the nursery; at the end no process and no file of any engine is left."""
    folder = Path(
        tempfile.mkdtemp(prefix="l3store-engines-")
    )  # a socket's address holds 107 characters
    try:
        one = Nursery(folder)
        try:
            yield one
        finally:
            one.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
