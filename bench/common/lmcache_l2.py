"""LMCache's L2 adapters, as its storage controllers drive them.

Adapters are made by LMCache's own factory from the JSON form of their configuration. Pages are its
`TensorMemoryObj` in one stretch of memory that the adapter is told of, keys its `ObjectKey`; both
are at hand before a timed part. A batch is one task: submit, wait for the event, take the result.
Imported in LMCache's own environment, by the drivers of the benchmarks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
from typing import TYPE_CHECKING, Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from serve import Peer, serve

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

__all__ = ["serve_adapter"]


def serve_adapter(configured: Callable[[argparse.Namespace], Any]) -> None:
    """Answers requests with the adapter that the driver's arguments make; see `serve`."""
    logging.disable(logging.INFO)
    serve(lambda given, payload: _L2(given, payload, configured(given)))


class _L2(Peer):
    """One adapter, driven from one thread."""

    def __init__(self, given: argparse.Namespace, payload: Any, configuration: Any) -> None:
        size, count = given.page_bytes, given.slots
        self.buffers = payload.aligned_buffer(count, size)
        whole = (ctypes.c_ubyte * (size * count)).from_buffer(self.buffers[0].obj)
        memory = torch.frombuffer(whole, dtype=torch.uint8)
        self._objects = [_page(memory[i * size : (i + 1) * size]) for i in range(count)]
        self._layout = {0: None}
        self._stored: list[ObjectKey] = []
        l1 = L1MemoryDesc(memory.data_ptr(), size * count, 4096, size * count)
        self._adapter = create_l2_adapter(configuration, l1)
        self._events = {}
        for name in ("store", "lookup_and_lock", "load"):
            poll = select.poll()
            file = getattr(self._adapter, f"get_{name}_event_fd")()
            poll.register(file, select.POLLIN)
            self._events[name] = (poll, file)

    def keys(self, hashes: Sequence[bytes]) -> list[ObjectKey]:
        return [ObjectKey(value, "bench", 0) for value in hashes]

    def put(self, keys: Sequence[ObjectKey], slots: range) -> int:
        task = self._adapter.submit_store_task(keys, self._objects[slots.start : slots.stop])
        result = None
        while result is None:
            self._wait("store")
            result = self._adapter.pop_completed_store_tasks().get(task)
        self._stored += keys
        return len(keys) if result.is_successful() else 0

    def get(self, keys: Sequence[ObjectKey], slots: range) -> int:
        task = self._adapter.submit_load_task(keys, self._objects[slots.start : slots.stop])
        found = None
        while found is None:
            self._wait("load")
            found = self._adapter.query_load_result(task)
        return found.popcount()

    def exists(self, keys: Sequence[ObjectKey]) -> int:
        task = self._adapter.submit_lookup_and_lock_task(keys, {})
        found = None
        while found is None:
            self._wait("lookup_and_lock")
            found = self._adapter.query_lookup_and_lock_result(task)
        return found.count_leading_ones()

    def release(self, keys: Sequence[ObjectKey]) -> None:
        self._adapter.submit_unlock(keys)

    def clear(self) -> None:
        self._adapter.delete(self._stored)
        self._stored = []

    def close(self) -> None:
        self._adapter.close()

    def _wait(self, name: str) -> None:
        poll, file = self._events[name]
        if not poll.poll(60_000):
            raise SystemExit(f"no {name} task was done in 60 s")
        os.read(file, 8)


def _page(memory: torch.Tensor) -> TensorMemoryObj:
    size = memory.numel()
    metadata = MemoryObjMetadata(
        torch.Size([size]), torch.uint8, memory.data_ptr(), size, 1,
        fmt=MemoryFormat.BINARY_BUFFER,
    )  # fmt: skip
    return TensorMemoryObj(memory, metadata, None)
