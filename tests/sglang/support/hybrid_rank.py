"""A rank whose model has more than one kind of KV: sglang's own trees, pools and controller.

As `hicache_rank.Rank`, with a second device pool that sglang mirrors as a sidecar of KV: the states
of mamba, a sliding window, or the index keys of DSA.
"""

from __future__ import annotations

import abc
import atexit
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import sglang_on_cpu.kvcacheio
import torch
from hicache_rank import Geometry, Rank, _key
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.pool_host import dsa, mamba
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Hybrid", "Indexed", "Mamba", "Window"]

_SIDECAR_LAYERS, _FULL_LAYERS = [0, 1], [2, 3]
_CPU = {"device": "cpu", "enable_memory_saver": False}


@dataclass(slots=True)
class Hybrid(Rank, abc.ABC):
    """L1, L2 and L3 of a hybrid model."""

    geometry: Geometry = field(
        default_factory=lambda: Geometry(layout="page_first_direct", direct=True, page_size=4)
    )
    requests: Any = field(init=False)
    inserted: list[torch.Tensor] = field(init=False)
    """What the sidecar held of the prompt that was inserted last."""
    name: ClassVar[str]
    """Of the sidecar's pool."""
    components: ClassVar[tuple[ComponentType, ...]] = ()
    about: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        sglang_on_cpu.kvcacheio.install()
        for module in (dsa, mamba):  # pools that the engine tests have none of
            for name, function in vars(sglang_on_cpu.kvcacheio).items():
                if name.startswith("transfer_kv_"):
                    setattr(module, name, function)
        args = self._publish()
        page = self.geometry.page_size
        self._build(self.pages * page, page)
        params = CacheInitParams(
            disable=False, req_to_token_pool=self.requests, page_size=page,
            token_to_kv_pool_allocator=self.allocator,
            tree_components=(ComponentType.FULL, *self.components), **self.about,
        )  # fmt: skip
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(args, params)
        atexit.unregister(self.cache.shutdown)
        self.cache.load_back_threshold = 0

    @abc.abstractmethod
    def _build(self, size: int, page: int) -> None:
        """Makes `requests`, `device` and `allocator` for `size` tokens."""

    @abc.abstractmethod
    def _parts(self) -> list[torch.Tensor]:
        """Returns the tensors of the sidecar in L1, slots first."""

    @abc.abstractmethod
    def _slots(self, rows: torch.Tensor, request: Any) -> torch.Tensor:
        """Returns the slots of the sidecar that the tokens in `rows` need to go on."""

    def _rows(self, count: int) -> torch.Tensor:
        return self.allocator.alloc(count).to(torch.int64)

    def layers(self) -> dict[str, torch.Tensor]:
        pool = self.device.full_kv_pool
        found = {f"layer {i} K": buffer for i, buffer in enumerate(pool.k_buffer)}
        found |= {f"layer {i} V": buffer for i, buffer in enumerate(pool.v_buffer)}
        return {name: _as_bytes(buffer) for name, buffer in found.items()}

    def insert(self, prompt: Sequence[int], *, seed: int = 0) -> dict[str, torch.Tensor]:
        """Puts a prompt's KV and sidecar into L1: random bytes. Returns the KV."""
        before = self.cache.path_device_indices(self._match(prompt).last_device_node)
        rows = torch.cat([before, self._rows(len(prompt) - len(before))])
        request = Req(
            rid=f"insert {seed}", origin_input_text="", origin_input_ids=array("q"),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )  # fmt: skip
        self.requests.alloc([request])
        new = rows[len(before) :]
        fresh, slots = self._slots(new, request), self._slots(rows, request)
        random = torch.Generator().manual_seed(seed)
        for tensors, at in ((self.layers().values(), new), (self._sidecar(), fresh)):
            for tensor in tensors:
                shape = (len(at), tensor.shape[1])
                tensor[at] = torch.randint(256, shape, dtype=torch.uint8, generator=random)
        self.inserted = [tensor[slots].clone() for tensor in self._sidecar()]
        state = {"mamba_value": slots} if ComponentType.MAMBA in self.components else {}
        self.cache.insert(InsertParams(key=_key(prompt), value=rows, **state))
        return self.held(prompt)

    def wipe(self) -> None:
        """Forgets L1 and L2 of all pools, and fills their memory with other bytes."""
        self.cache.reset()
        self.allocator.clear()
        self.requests.clear()
        for tensor in (*self.layers().values(), *self._sidecar()):
            tensor.fill_(0xA5)
        for entry in self.cache.cache_controller.mem_pool_host.entries:
            pool = entry.host_pool
            buffers = pool.index_k_with_scale_buffer if entry.name == "indexer" else pool.kv_buffer
            for buffer in [buffers] if isinstance(buffers, torch.Tensor) else buffers:
                buffer.view(torch.uint8).fill_(0x5A)

    def load_back_all(
        self, prompt: Sequence[int]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Copies what L2 holds of a prompt into L1; returns its KV and its sidecar there."""
        match = self._match(prompt)
        request = SimpleNamespace(
            rid="load", cache_request_handle=CacheRequestHandle("load", 0), kv=ReqKvInfo(),
            last_node=match.last_device_node, prefix_len=match.device_prefix_len,
            swa_host_hit_length=match.swa_host_hit_length, priority=0, lock=None,
            mamba_host_hit_length=match.mamba_host_hit_length,
        )  # fmt: skip
        self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node, host_hit_length=match.host_hit_length,
                req=request,
            )
        )  # fmt: skip
        self.cache.ready_to_load_host_cache()
        self.pump(lambda: not self.cache.cache_controller.ack_load_queue)
        rows = self.cache.path_device_indices(self._match(prompt).last_device_node)
        slots = self._slots(rows, request)
        return self.held(prompt), [tensor[slots].clone() for tensor in self._sidecar()]

    def _sidecar(self) -> list[torch.Tensor]:
        return [_as_bytes(part) for part in self._parts()]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(tensor.shape[0], -1)


@dataclass(slots=True)
class Mamba(Hybrid):
    """A state at the end of each prompt: the last page makes an end point legal."""

    name: ClassVar[str] = "mamba"
    components: ClassVar = (ComponentType.MAMBA,)
    about: ClassVar = {"enable_mamba_extra_buffer": True}

    def _build(self, size: int, page: int) -> None:
        with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
            shape = Mamba2StateShape.create(
                tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=2, head_dim=8,
                state_size=8, conv_kernel=4,
            )  # fmt: skip
            states = Mamba2CacheParams(shape=shape, layers=_SIDECAR_LAYERS)
        self.requests = HybridReqToTokenPool(
            size=8, mamba_size=20, mamba_spec_state_size=8, max_context_len=size,
            cache_params=states, mamba_layer_ids=_SIDECAR_LAYERS, enable_mamba_extra_buffer=True,
            speculative_num_draft_tokens=3, **_CPU,
        )  # fmt: skip
        self.device = HybridLinearKVPool(
            size=size, page_size=page, dtype=torch.bfloat16, head_num=2, head_dim=16,
            full_attention_layer_ids=_FULL_LAYERS, mamba_pool=self.requests.mamba_pool, **_CPU,
        )  # fmt: skip
        self.allocator = PagedTokenToKVPoolAllocator(
            size=size, page_size=page, dtype=torch.bfloat16, device="cpu", kvcache=self.device,
            need_sort=False,
        )  # fmt: skip

    def _parts(self) -> list[torch.Tensor]:
        states = self.requests.mamba_pool.mamba_cache
        return [layer for part in (states.temporal, *states.conv) for layer in part.unbind(0)]

    def _slots(self, rows: torch.Tensor, request: Any) -> torch.Tensor:
        return request.kv.mamba_pool_idx.unsqueeze(0)


@dataclass(slots=True)
class Window(Hybrid):
    """Attention over the last three pages: they make an end point legal."""

    name: ClassVar[str] = "swa"
    pages_wide: ClassVar[int] = 3
    components: ClassVar = (ComponentType.SWA,)
    about: ClassVar = {"sliding_window_size": 12}

    def _build(self, size: int, page: int) -> None:
        self.requests = ReqToTokenPool(size=8, max_context_len=size, **_CPU)
        common = {"size_swa": size, "size": size, "page_size": page, "dtype": torch.bfloat16}
        self.device = SWAKVPool(
            head_num=2, head_dim=16, swa_attention_layer_ids=_SIDECAR_LAYERS,
            full_attention_layer_ids=_FULL_LAYERS, device="cpu", **common,
        )  # fmt: skip
        self.allocator = SWATokenToKVPoolAllocator(
            kvcache=self.device, need_sort=False, device="cpu", **common
        )

    def _parts(self) -> list[torch.Tensor]:
        pool = self.device.swa_kv_pool
        return [*pool.k_buffer, *pool.v_buffer]

    def _rows(self, count: int) -> torch.Tensor:
        # What the allocator does for a forward pass, without the batch.
        rows = self.allocator.full_attn_allocator.alloc(count)
        self.allocator.full_to_swa_index_mapping[rows] = self.allocator.swa_attn_allocator.alloc(
            count
        ).to(self.allocator.full_to_swa_index_mapping.dtype)
        return rows.to(torch.int64)

    def _slots(self, rows: torch.Tensor, request: Any) -> torch.Tensor:
        window = rows[-self.pages_wide * self.geometry.page_size :]
        return self.allocator.full_to_swa_index_mapping[window].to(torch.int64)


@dataclass(slots=True)
class Indexed(Hybrid):
    """Index keys of DSA beside MLA's KV: every page has its own."""

    geometry: Geometry = field(
        default_factory=lambda: Geometry(
            mla=True, layout="page_first_direct", direct=True, page_size=64
        )
    )
    pages: int = 24
    name: ClassVar[str] = "indexer"

    def _build(self, size: int, page: int) -> None:
        self.requests = ReqToTokenPool(size=8, max_context_len=size, **_CPU)
        common = {"size": size, "page_size": page, "dtype": torch.bfloat16}
        self.device = DSATokenToKVPool(
            kv_lora_rank=32, qk_rope_head_dim=16, kv_cache_dim=48, layer_num=2,
            index_head_dim=128, **common, **_CPU,
        )  # fmt: skip
        self.allocator = PagedTokenToKVPoolAllocator(
            kvcache=self.device, need_sort=False, device="cpu", **common
        )

    def layers(self) -> dict[str, torch.Tensor]:
        return {f"layer {i}": _as_bytes(b) for i, b in enumerate(self.device.kv_buffer)}

    def _parts(self) -> list[torch.Tensor]:
        return list(self.device.index_k_with_scale_buffer)

    def _slots(self, rows: torch.Tensor, request: Any) -> torch.Tensor:
        page = self.geometry.page_size
        return rows[::page] // page
