"""`sgl.Engine` on this machine's CPU, many times over: an engine costs a second and not twenty.

Run as a program this file is the nursery: it has sglang imported and no thread, and forks a process
for each connection, which starts an engine when it is told to and whose scheduler processes are
forked likewise. An engine's processes are one process group. No two engines share anything but the
bytecode, so one that starts on a store where another ended knows of it what stands there.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Answer", "Engine", "EngineError", "nursery", "prompt"]

PAGE_SIZE = 16
# A multiple of 8. Where the engine computes another number of tokens at once, the last bits of its
# KV are others: seen, without any store.
LENGTH = 600
STORED = LENGTH // PAGE_SIZE * PAGE_SIZE
"""Tokens of a prompt that whole pages hold, and that storage can give back."""

_PR_SET_CHILD_SUBREAPER = 36
_SECONDS = 60.0  # the longest that any command may take
_ADAPTER = {
    "backend_name": "l3store",
    "module_path": "l3store.adapters.sglang",
    "class_name": "L3StoreHiCache",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}
_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    # Large on purpose: with the usual 0.02 the answer hardly depends on the KV, and a test that
    # restores wrong KV would pass.
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}


# -- in the test ----------------------------------------------------------------------------------


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
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_SECONDS)
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
        self._shared = _shared_memory(self.pid)
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

    def said(self, tail: int | None = None) -> str:
        """Returns the end of what the engine's processes wrote, in characters."""
        return self.log.read_text(errors="replace")[-(tail or 0) :]

    def kill(self) -> None:
        """kill -9 of all its processes; returns when they are gone, with all their locks."""
        shared = self._shared | _shared_memory(self.pid)
        with suppress(OSError):
            self._lines.close()
        self._socket.close()
        with suppress(ProcessLookupError):
            while True:
                os.killpg(self.pid, signal.SIGKILL)
                time.sleep(0.005)  # until the nursery has buried the last of them
        for file in shared:  # which sglang leaves when it is killed, and it always is
            file.unlink(missing_ok=True)


def _shared_memory(group: int) -> set[Path]:
    """Returns the files of shared memory that a process group has mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                words = (process / "maps").read_text().split()
                found |= {Path(word) for word in words if word.startswith("/dev/shm/s")}
    return found


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
            [sys.executable, "-W", "ignore", __file__, str(folder / "s")],
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
    folder = Path(tempfile.mkdtemp(prefix="l3s"))  # a socket's address holds 107 characters
    try:
        one = Nursery(folder)
        try:
            yield one
        finally:
            one.close()
    finally:
        shutil.rmtree(folder)


# -- in the nursery, and in what it forks ---------------------------------------------------------


_IMPORTED = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "tiny_models.llama",
    "transformers.models.llama.modeling_llama",
)
"""All that an engine and its processes import."""


def _nurse(address: str) -> None:
    for module in _IMPORTED:
        importlib.import_module(module)
    # sglang asks for "spawn", which would import all of it again in each process.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kw: None

    # Nobody waits for engines, nor for the processes of one that was killed, which come here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    print("ready", flush=True)
    while server in select.select([server, sys.stdin], [], [])[0]:
        connection, _ = server.accept()
        if not os.fork():
            os.setsid()  # first of all: what ends it ends its group
            server.close()
            try:
                _obey(connection)
            finally:
                os.killpg(0, signal.SIGKILL)
        connection.close()
    os._exit(0)  # taking all that apart in order takes seconds


def _obey(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    lines = connection.makefile("rw", encoding="utf-8")
    log = os.open(lines.readline().strip(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def say(value: Any) -> None:
        lines.write(json.dumps(value) + "\n")
        lines.flush()

    say(os.getpid())
    served = _Served()
    while line := lines.readline():
        command, values = json.loads(line)
        try:
            value = getattr(served, command)(*values)
        except BaseException:
            say([False, traceback.format_exc()])
        else:
            say([True, value])


class _Served:
    """The commands."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._posted: Any = None

    def make_model(self, path: str, seed: int) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**_MODEL, dtype="bfloat16"))
        model.to(torch.bfloat16).save_pretrained(path)

    def start(self, args: dict[str, Any]) -> None:
        import sglang

        if args["tp_size"] * args["pp_size"] > 1:
            cores = sorted(os.sched_getaffinity(0))
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
        self._engine = sglang.Engine(**{**_SETTINGS, **args})

    def ask(self, prompts: list[list[int]]) -> list[tuple[Any, ...]]:
        return self._run(self._answers(prompts))

    def post(self, prompts: list[list[int]]) -> None:
        self._posted = self._engine.loop.create_task(self._answers(prompts))
        self._run(asyncio.sleep(0.1))  # the loop runs only while a command does

    def collect(self) -> list[tuple[Any, ...]]:
        return self._run(self._posted)

    async def _answers(self, prompts: list[list[int]]) -> list[tuple[Any, ...]]:
        outputs = await self._engine.async_generate(
            input_ids=prompts,
            sampling_params={"max_new_tokens": 8, "temperature": 0},
            return_logprob=True,
        )
        return [_answer(output) for output in outputs]

    def _run(self, awaitable: Any) -> Any:
        return self._engine.loop.run_until_complete(awaitable)

    def flush(self) -> None:
        # Refused while the engine is busy, and it is while pages are on their way to storage.
        manager = self._engine.tokenizer_manager
        self._admin(lambda: manager.flush_cache(timeout_s=_SECONDS / 2))

    def attach(self, extra: str, backend: str) -> None:
        manager = self._engine.tokenizer_manager
        self._admin(lambda: manager.attach_hicache_storage(backend, extra, "wait_complete"))

    def detach(self) -> None:
        self._admin(self._engine.tokenizer_manager.detach_hicache_storage)

    def update_weights(self, path: str, version: str | None) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        request = UpdateWeightFromDiskReqInput(model_path=path, weight_version=version)
        manager = self._engine.tokenizer_manager
        done, said, _ = self._run(manager.update_weights_from_disk(request, None))
        if not done:
            raise RuntimeError(said)

    def _admin(self, request: Callable[[], Any]) -> None:
        until = time.monotonic() + _SECONDS / 2
        while not (said := self._run(request())).success:
            if "not idle" not in said.message or time.monotonic() > until:
                raise RuntimeError(said.message)
            time.sleep(0.02)


_SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "page_size": PAGE_SIZE,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.2,
    "random_seed": 1,
    "sleep_on_idle": True,
    "log_level": "info",
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_mem_layout": "page_first",
    "hicache_io_backend": "kernel",
    "hicache_storage_prefetch_policy": "wait_complete",
}


def _answer(output: dict[str, Any]) -> tuple[Any, ...]:
    meta = output["meta_info"]
    cached = meta.get("cached_tokens_details") or {}
    counts = [cached.get(where, 0) for where in ("storage", "device", "host")]
    return (output["output_ids"], meta["output_token_logprobs"][0][0], *counts)


if __name__ == "__main__":
    _nurse(sys.argv[1])
