"""Forks engines: one costs a second and not twenty. A program; serving.py starts it.

It has sglang imported and no thread, and forks a process for each connection, which starts an
engine when it is told to and whose scheduler processes are forked likewise. An engine's processes
are one process group. No two engines share anything but the code, so one that starts on a store
where another ended knows of it what stands there.
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
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["PAGE_SIZE", "SECONDS", "shared_memory"]

PAGE_SIZE = 16
SECONDS = 60.0
"""The longest that any command may take."""

_PR_SET_CHILD_SUBREAPER = 36
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


def shared_memory(processes: Iterable[int]) -> set[Path]:
    """Returns the files of shared memory that processes have mapped."""
    found = set()
    for process in processes:
        with suppress(OSError):
            words = Path(f"/proc/{process}/maps").read_text().split()
            found |= {Path(word) for word in words if word.startswith("/dev/shm/s")}
    return found


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
    # Whoever told engines what to do is gone, perhaps without a word, perhaps while they did it.
    while left := psutil.Process().children(recursive=True):
        shared = shared_memory({process.pid for process in left})
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for file in shared:
            file.unlink(missing_ok=True)
        time.sleep(0.005)
    shutil.rmtree(Path(address).parent, ignore_errors=True)
    os._exit(0)  # taking all that is imported apart in order takes seconds


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
        self._admin(lambda: manager.flush_cache(timeout_s=SECONDS / 2))

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
        until = time.monotonic() + SECONDS / 2
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
