"""SGLang's `file` backend of HiCache, by the code of its cache controller.

`HiCacheController._generic_page_get` and `_generic_page_set` are what the controller chooses for
this backend; they run here as they are, over the real `HiCacheFile` and a real MLA host pool (in
memory of ours) in the layout page_first, where a page is one piece: what costs sglang least.
Lookups are its `batch_exists`, as `_storage_hit_query` calls it.
"""

from __future__ import annotations

import logging
import os
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import absent
import torch
from serve import Peer, serve

os.environ.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None)
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
absent.install()

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLAHostAllocation, MLATokenToKVPoolHost  # noqa: E402

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_TOKENS = 64
_TOKEN_BYTES = 1024  # one layer's: 512 values of two bytes


class File(Peer):
    """The backend, driven from one thread as the controller's are."""

    def __init__(self, given: argparse.Namespace, payload: Any) -> None:
        layers, rest = divmod(given.page_bytes, _TOKENS * _TOKEN_BYTES)
        if rest:
            raise SystemExit(f"pages are multiples of {_TOKENS * _TOKEN_BYTES} bytes here")
        pool = MLATokenToKVPoolHost(
            MLAHostAllocation(
                dtype=torch.bfloat16, kv_lora_rank=448, qk_rope_head_dim=64, kv_cache_dim=512,
                size_per_token=_TOKEN_BYTES * layers,
            ),
            1.0, 0, _TOKENS, "page_first", pin_memory=False, device_capacity_tokens=1,
            start_layer=0, end_layer=layers, target_layer_num=layers,
            host_token_capacity=given.slots * _TOKENS,
        )  # fmt: skip
        self.buffers = payload.aligned_buffer(given.slots, given.page_bytes)
        whole = torch.frombuffer(self.buffers[0].obj, dtype=torch.bfloat16)
        pool.kv_buffer = whole.view(given.slots * _TOKENS, layers, 1, 512)  # as page_first lies
        self._backend = HiCacheFile(
            HiCacheStorageConfig(
                tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
                is_mla_model=True, enable_storage_metrics=False, is_page_first_layout=True,
                model_name="bench", extra_config={"file_storage_path": given.dir},
            )
        )  # fmt: skip
        self._backend.register_mem_pool_host(pool)
        self._controller = SimpleNamespace(
            storage_host_pool=pool, storage_backend=self._backend, page_size=_TOKENS
        )
        self._operation = SimpleNamespace(request_id="bench", is_terminated=lambda: False)
        self._tokens = torch.arange(given.slots * _TOKENS, dtype=torch.int64)

    def keys(self, hashes: Sequence[bytes]) -> list[str]:
        return [value.hex() for value in hashes]

    def put(self, keys: Sequence[str], slots: range) -> int:
        done = HiCacheController._generic_page_set(self._controller, keys, self._indices(slots))
        return len(keys) if done else 0

    def get(self, keys: Sequence[str], slots: range) -> int:
        indices = self._indices(slots)
        return HiCacheController._generic_page_get(self._controller, self._operation, keys, indices)

    def exists(self, keys: Sequence[str]) -> int:
        return self._backend.batch_exists(keys)

    def clear(self) -> None:
        self._backend.clear()

    def _indices(self, slots: range) -> torch.Tensor:
        return self._tokens[slots.start * _TOKENS : slots.stop * _TOKENS]


if __name__ == "__main__":
    torch.set_num_threads(1)  # as sglang's model runner does where there is a GPU
    serve(File)
