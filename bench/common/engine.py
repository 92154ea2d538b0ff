"""sglang's host pools and its cache controller, without a GPU and without a model.

All of it is sglang's own code: the device pool (one page, on the CPU), the host pool made from it
as the engine makes it, the group around it and `HybridCacheController`, which attaches a storage
backend and picks the calls it reads and writes pages with. Importing this imports sglang.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import warnings
from typing import Any, NamedTuple

import absent
import torch

for _name in ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
              "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY",
              "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"):  # fmt: skip
    os.environ.pop(_name, None)
warnings.filterwarnings("ignore")
absent.install()

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (  # noqa: E402
    HybridCacheController,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import (  # noqa: E402
    ServerArgs,
    set_global_server_args_for_scheduler,
)
from sglang.srt.utils import freeze_gc  # noqa: E402

__all__ = ["MODEL", "Engine", "Geometry", "set_up"]

MODEL = "bench/model"
_ITEM = torch.bfloat16.itemsize


class Geometry(NamedTuple):
    """What a host pool is like. A row is what one token has in one layer."""

    mla: bool
    layout: str
    tokens: int
    """A page."""
    layers: int
    row_bytes: int
    """Of K and V together, in bfloat16: one head (MHA), or the latent and 1/8 of it (MLA)."""

    @property
    def page_bytes(self) -> int:
        return self.tokens * self.layers * self.row_bytes

    @property
    def segments(self) -> int:
        """Pieces that a page lies in."""
        pieces = 1 if self.mla else 2
        return pieces * (self.layers if self.layout == "layer_first" else 1)

    @property
    def name(self) -> str:
        return f"{'MLA' if self.mla else 'MHA'} {self.layout}"


def set_up() -> None:
    """Gives this process what a scheduler of one rank has; call it once.

    One torch thread, as sglang's model runner sets on GPU machines.
    """
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
    get_parallel().override_permanently(
        tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_dp_rank=0, attn_dcp_rank=0
    )
    atexit.register(gc.unfreeze)  # or libraries tell at exit what they think was leaked


class Engine:
    """A host pool, to which any number of controllers attach a storage backend each.

    Args:
        geometry: Of its pages.
        pages: How many the host pool holds.
    """

    def __init__(self, geometry: Geometry, pages: int) -> None:
        self.geometry = geometry
        tokens, layers = geometry.tokens, geometry.layers
        values = geometry.row_bytes // _ITEM
        common = {
            "size": tokens, "page_size": tokens, "dtype": torch.bfloat16, "layer_num": layers,
            "device": "cpu", "enable_memory_saver": False,
        }  # fmt: skip
        device: Any
        if geometry.mla:
            rope = values // 8
            device = MLATokenToKVPool(
                kv_lora_rank=values - rope, qk_rope_head_dim=rope, **common
            )  # fmt: skip
        else:
            device = MHATokenToKVPool(head_num=1, head_dim=values // 2, **common)
        info = device.get_device_pool_infos()[0].buffer_info
        host = {
            "host_to_device_ratio": 1.0, "host_size": 0, "page_size": tokens,
            "layout": geometry.layout, "pin_memory": False, "device_capacity_tokens": tokens,
            "start_layer": device.start_layer, "end_layer": device.end_layer,
            "host_token_capacity": pages * tokens,
        }  # fmt: skip
        if geometry.mla:
            self.host = MLATokenToKVPoolHost(
                info, target_layer_num=layers, override_kv_cache_dim=device.kv_cache_dim, **host
            )
        else:
            self.host = get_mha_host_pool_cls(info)(info, **host)
        seen = self.host.get_page_buffer_meta(torch.arange(tokens))[1]
        if (len(seen), sum(seen)) != (geometry.segments, geometry.page_bytes):
            raise SystemExit(
                f"sglang's pages of {geometry.name} have {len(seen)} pieces, {sum(seen)} bytes, "
                f"not {geometry.segments}, {geometry.page_bytes}"
            )
        self._allocator = PagedTokenToKVPoolAllocator(
            size=tokens, page_size=tokens, dtype=torch.bfloat16, device="cpu", kvcache=device,
            need_sort=False,
        )  # fmt: skip
        entry = PoolEntry(PoolName.KV, self.host, device, lambda layer: layer)
        entry.is_primary_index_anchor = True
        self._group = HostPoolGroup([entry])

    def controller(self, storage: str, extra: dict[str, Any]) -> Any:
        """Returns a `HybridCacheController` with a storage backend attached.

        Args:
            storage: As `--hicache-storage-backend`.
            extra: As `--hicache-storage-backend-extra-config`, but parsed.
        """
        controller = HybridCacheController(
            self._allocator, self._group, self.geometry.tokens, None, threading.Event(),
            io_backend="kernel", storage_backend=storage, model_name=MODEL,
            storage_backend_extra_config=extra,
        )  # fmt: skip
        freeze_gc("bench")  # as sglang's server does when it is warm: half a million objects
        return controller

    def indices(self, pages: range) -> torch.Tensor:
        """Returns the host indices of pages of the pool, as the controller has them."""
        tokens = self.geometry.tokens
        return torch.arange(pages.start * tokens, pages.stop * tokens, dtype=torch.int64)
