"""The adapter on host pools of a test's own, created and registered as sglang's controller does."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from l3store.adapters.sglang import L3StoreHiCache

__all__ = ["attach", "hashes", "indices", "register"]


def attach(
    url: str,
    model: Path,
    anchor: Any,
    sidecars: Mapping[str, Any] | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    resolved: Mapping[str, Any] | None = None,
    ranks: Mapping[str, Any] | None = None,
    **options: Any,
) -> L3StoreHiCache:
    """Returns the adapter over the store at `url`, with its pools registered.

    Args:
        url: The store.
        model: A folder of `hicache_rank.make_model`.
        anchor: The pool of KV.
        sidecars: Other pools of the start, by name.
        args: For sglang's server arguments, as given.
        resolved: What sglang makes of server arguments, where that differs.
        ranks: For `HiCacheStorageConfig`.
        options: For the extra config.
    """
    given = {"model_path": str(model), "page_size": anchor.page_size, **(args or {})}
    set_global_server_args_for_scheduler(
        _arguments(tuple(given.items()), tuple((resolved or {}).items()))
    )
    extra = {
        "backend_name": "l3store",
        "module_path": "l3store.adapters.sglang",
        "class_name": "L3StoreHiCache",
        "interface_v1": 1,
        "url": url,
    }
    config = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": anchor.layout == "page_first", "model_name": "tiny/model",
    }  # fmt: skip
    backend = StorageBackendFactory.create_backend(
        "dynamic", HiCacheStorageConfig(**config | (ranks or {}), extra_config=extra | options),
        anchor,
    )  # fmt: skip
    backend.register_mem_pool_host(anchor)
    register(backend, {"kv": anchor, **(sidecars or {})})
    backend.on_host_pools_registered()
    return backend


@functools.cache
def _arguments(given: tuple[tuple[str, Any], ...], resolved: tuple[tuple[str, Any], ...]) -> Any:
    """Makes sglang's arguments, once: what it makes of them takes a tenth of a second."""
    arguments = ServerArgs(device="cpu", **dict(given))
    if resolved:
        declare_resolution(arguments, "test", **dict(resolved))
    return arguments


def register(backend: L3StoreHiCache, pools: Mapping[str, Any]) -> None:
    """Registers pools of a group; after the start, what sglang adds while it serves."""
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, PoolName(name))


def hashes(count: int, *, prompt: str = "a") -> list[str]:
    """Returns the page hashes of a prompt, as sglang writes them."""
    return [hashlib.sha256(f"{prompt} {i}".encode()).hexdigest() for i in range(count)]


def indices(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """Returns the token indices of host pages, as sglang's allocator gives them."""
    size = pool.page_size
    starts = torch.tensor(list(pages), dtype=torch.int64) * size
    return (starts[:, None] + torch.arange(size)).reshape(-1)
