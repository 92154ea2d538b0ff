"""sglang's own host pools of every kind, on a CPU, in memory that is watched.

No engine: each builder makes the device tensors that the pool mirrors, and the pool from them. All
memory of a pool lies between guards: `Watched.guards_hold` says whether anything wrote beside it.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache import memory_pool_host
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
    MLASplitBuffers,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host import base, dsa, mamba
from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "PAGES",
    "PAGE_SIZE",
    "Watched",
    "indexer",
    "logical",
    "mamba_states",
    "mha",
    "mla",
    "mla_split",
    "v4_pages",
    "v4_states",
]

PAGE_SIZE, PAGES, LAYERS = 4, 7, 3
INDEXER_PAGE_SIZE = 64  # the only one that sglang's DSA has
_GUARD = 4096
_BYTE = 0xA5
_CPU = torch.device("cpu")


class Watched(HostTensorAllocator):
    """Allocates between guards. Each pool has one of its own, as `pool.allocator`."""

    def __init__(self) -> None:
        super().__init__()
        self._raw: list[torch.Tensor] = []

    def allocate(self, dims: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        size = math.prod(dims) * dtype.itemsize
        raw = torch.full((_GUARD + size + _GUARD,), _BYTE, dtype=torch.uint8)
        self._raw.append(raw)
        return raw[_GUARD : _GUARD + size].view(dtype).view(dims)

    @property
    def memory(self) -> list[torch.Tensor]:
        """All bytes of the pool, one tensor an allocation."""
        return [raw[_GUARD:-_GUARD] for raw in self._raw]

    def guards_hold(self) -> bool:
        return all(
            bool((raw[:_GUARD] == _BYTE).all() and (raw[-_GUARD:] == _BYTE).all())
            for raw in self._raw
        )

    def fill(self, seed: int) -> None:
        """Fills the pool with random bytes."""
        random = torch.Generator().manual_seed(seed)
        for memory in self.memory:
            memory.copy_(torch.randint(256, memory.shape, dtype=torch.uint8, generator=random))

    def copy(self) -> list[torch.Tensor]:
        return [memory.clone() for memory in self.memory]

    def restore(self, copy: list[torch.Tensor]) -> None:
        for memory, kept in zip(self.memory, copy, strict=True):
            memory.copy_(kept)

    def equals(self, copy: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.memory, copy, strict=True))


@contextmanager
def _watched() -> Iterator[None]:
    """Within it pools are made with `Watched`, and without a look at the machine's free memory."""
    modules = (base, dsa, mamba, memory_pool_host)
    before = [module.get_allocator_from_storage for module in modules]
    for module in modules:
        module.get_allocator_from_storage = lambda kind: Watched()
    try:
        with base.host_memory_budget_scope(1 << 30):
            yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.get_allocator_from_storage = function


def _addresses(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _size(pages: int, page_size: int, layers: int) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 1.0, "host_size": 0, "page_size": page_size, "pin_memory": False,
        "device_capacity_tokens": page_size, "start_layer": 0, "end_layer": layers - 1,
        "host_token_capacity": pages * page_size,
    }  # fmt: skip


def mha(
    layout: str = "page_first",
    *,
    heads: int = 4,
    head_dim: int = 8,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    pages: int = PAGES,
    page_size: int = PAGE_SIZE,
    layers: int = LAYERS,
    device_layout: KVBufferLayout = KVBufferLayout.NHD,
) -> Any:
    """K and V of every token; with another `v_head_dim` sglang builds its asymmetric pool."""
    widths = head_dim, head_dim if v_head_dim is None else v_head_dim
    k, v = (
        tuple(torch.zeros(page_size, heads, width, dtype=dtype) for _ in range(layers))
        for width in widths
    )
    buffers = KVBuffers(
        k=k, v=v, k_data_ptrs=_addresses(k), v_data_ptrs=_addresses(v), layout=device_layout
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=page_size, head_num=heads, head_dim=widths[0],
        v_head_dim=widths[1], dtype=dtype, device=_CPU,
    )  # fmt: skip
    with _watched():
        return get_mha_host_pool_cls(info)(info, layout=layout, **_size(pages, page_size, layers))


def mla(
    layout: str = "page_first",
    *,
    dtype: torch.dtype = torch.bfloat16,
    pages: int = PAGES,
    page_size: int = PAGE_SIZE,
    layers: int = LAYERS,
) -> Any:
    """The latent of every token: 8 wide, and 4 of rope."""
    rows = tuple(torch.zeros(page_size, 1, 12, dtype=dtype) for _ in range(layers))
    return _mla(layout, rows, dtype, pages, page_size, layers)


def mla_split() -> Any:
    """The layout that sglang has for NPUs alone: latent and rope apart."""
    k, v = (torch.zeros(LAYERS, 1, PAGE_SIZE, 1, width, dtype=torch.bfloat16) for width in (8, 4))
    native = MLASplitBuffers(
        k=k, v=v, index_k=None, index_scales=None, index_layer_indices=(), k_width=8, v_width=4,
        index_width=0,
    )  # fmt: skip
    return _mla("page_first_kv_split", native, torch.bfloat16, PAGES, PAGE_SIZE, LAYERS)


def _mla(
    layout: str, buffers: Any, dtype: torch.dtype, pages: int, page_size: int, layers: int
) -> Any:
    info = MLABufferInfo(
        buffers=buffers, data_ptrs=_addresses(buffers) if isinstance(buffers, tuple) else None,
        layer_indices=tuple(range(layers)), device_layer_num=layers, page_size=page_size,
        kv_lora_rank=8, qk_rope_head_dim=4, kv_cache_dim=12, dtype=dtype, device=_CPU,
    )  # fmt: skip
    with _watched():
        return MLATokenToKVPoolHost(
            info, layout=layout, target_layer_num=layers, **_size(pages, page_size, layers)
        )


def indexer(layout: str = "page_first", *, pages: int = PAGES) -> Any:
    """The index keys of DSA, over the pages of an MLA pool of the same layout."""
    device = DSATokenToKVPool(
        size=INDEXER_PAGE_SIZE, page_size=INDEXER_PAGE_SIZE, kv_lora_rank=8, qk_rope_head_dim=4,
        kv_cache_dim=12, dtype=torch.bfloat16, layer_num=LAYERS, device="cpu", index_head_dim=128,
        enable_memory_saver=False, index_buf_size=INDEXER_PAGE_SIZE,
    )  # fmt: skip
    anchor = mla(layout, pages=pages, page_size=INDEXER_PAGE_SIZE)
    (_, declared) = device.host_pool_decls()
    with _watched():
        return DSAIndexerPoolHost(declared, anchor, pin_memory=False)


def mamba_states(
    layout: str = "page_first", *, side_states: bool = False, conv_only: bool = False,
    slots: int = PAGES,
) -> Any:  # fmt: skip
    """One state a slot, of a temporal and two convolution parts; its page size is 1."""
    sides = (torch.zeros(slots, 7, dtype=torch.uint8), torch.zeros(slots, 2)) if side_states else ()
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, slots, *((0,) if conv_only else (2, 4, 4))),
        conv=tuple(torch.zeros(LAYERS, slots, n, 3, dtype=torch.bfloat16) for n in (5, 2)),
        extra_checkpoint_buffers=sides,
    )
    with _watched():
        # sglang adds one slot to what it is asked for.
        return MambaPoolHost(
            info, 1.0, 0, device_capacity=slots - 1, pin_memory=False, layout=layout
        )


def v4_pages(
    layout: str = "page_first", *, name: str = "deepseek_v4_c4", pages: int = PAGES,
    page_size: int = PAGE_SIZE, item_bytes: int = 96,
) -> Any:  # fmt: skip
    """A compressed pool of DeepSeek V4: opaque pages, which are anchored to tokens."""
    device = [torch.zeros(1, item_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    with _watched():
        return DeepSeekV4PagedHostPool(
            name, device, item_bytes, pages, page_size, layout, pin_memory=False,
            page_aligned_only=True,
        )  # fmt: skip


def v4_states(layout: str = "page_first") -> Any:
    """The compressor's states of DeepSeek V4, a ring of four slots a page."""
    states = [
        SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(8, 6)), ring_size=4)
        for _ in range(LAYERS)
    ]
    with _watched():
        return DeepSeekV4StateHostPool(
            "deepseek_v4_c4_state", states, PAGES, PAGE_SIZE, layout, pin_memory=False
        )


def logical(*, pages: int = PAGES, page_size: int = PAGE_SIZE) -> Any:
    """Pages without bytes: what the other pools of DeepSeek V4 are anchored to."""
    return LogicalHostPool(pages * page_size, page_size, "page_first")
