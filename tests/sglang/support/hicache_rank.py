"""One rank's HiCache in this process: sglang's own prefix tree, pools and controller, on a CPU.

No model and no scheduler: a test says what the scheduler would (`insert`, `backup`, `prefetch`,
`load_back`), and looks at the bytes. sglang keeps its arguments and ranks for the whole process, so
ranks of one process are made and used one after the other.
"""

from __future__ import annotations

import atexit
import json
import time
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import sglang_on_cpu.kvcacheio
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

__all__ = ["Geometry", "Position", "Rank", "differing", "l3store", "make_model", "tokens"]

LAYERS = 4
"""Of the model; a pipeline stage holds its share."""
SECONDS = 30.0
"""The longest that anything here may take; then it is a `TimeoutError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a rank's pools are like."""

    mla: bool = False
    layout: str = "page_first"
    direct: bool = False
    """The io backend `direct`; page_first_direct always has it, the other layouts have `kernel`."""
    page_size: int = 16
    heads: int = 2
    """On this rank; MLA has none."""
    dtype: torch.dtype = torch.bfloat16

    @property
    def io(self) -> str:
        return "direct" if self.direct or self.layout == "page_first_direct" else "kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where this process stands among the ranks."""

    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1
    group: ProcessGroup | None = None
    """All of them: either the TP or the PP group."""
    agree: Callable[[bool], bool] = bool
    """Whether all ranks say yes. Schedulers step together, and so each step here asks."""


def tokens(pages: int, *, page_size: int = 16, seed: int = 0) -> list[int]:
    """Returns a prompt of whole pages; another seed has no page in common with it."""
    return [seed * 100_000 + i for i in range(pages * page_size)]


def l3store(url: str, *, v1: bool = True, parents: bool = True, **options: Any) -> dict[str, Any]:
    """Returns the extra config for our adapter; `v1` is zero-copy, without it pages are copied."""
    extra = {
        "backend_name": "l3store",
        "module_path": "l3store.adapters.sglang",
        "class_name": "L3StoreHiCache",
        "url": url,
        "hicache_storage_pass_prefix_keys": parents,
    }
    return extra | ({"interface_v1": 1} if v1 else {}) | options


def differing(found: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the layers whose bytes, or their number, are not what was written."""
    names = found.keys() | written.keys()
    return sorted(
        name
        for name in names
        if name not in found or name not in written or not torch.equal(found[name], written[name])
    )


def make_model(folder: Path) -> Path:
    """Writes what sglang and the adapter read of a model: its configuration, and some weights."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 1024,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return folder


@dataclass(slots=True)
class Rank:
    """L1, L2 and what moves pages between them and L3.

    Args:
        model: A folder of `make_model`.
        extra: The extra config of the storage backend `dynamic`; None for sglang's own `file`.
        geometry: Of the pools.
        position: Among other ranks.
        pages: L1 has room for so many, L2 for twice as many.

    Raises:
        Exception: Whatever the storage backend raises when it is attached.
    """

    model: Path
    extra: Mapping[str, Any] | None
    geometry: Geometry = field(default_factory=Geometry)
    position: Position = field(default_factory=Position)
    pages: int = 64
    device: Any = field(init=False)
    allocator: Any = field(init=False)
    cache: Any = field(init=False)

    def __post_init__(self) -> None:
        geometry, at = self.geometry, self.position
        sglang_on_cpu.kvcacheio.install()
        size = self.pages * geometry.page_size
        args = self._publish()
        layers = LAYERS // at.pp_size
        common = {
            "size": size, "page_size": geometry.page_size, "dtype": geometry.dtype,
            "layer_num": layers, "device": "cpu", "enable_memory_saver": False,
            "start_layer": at.pp * layers, "end_layer": (at.pp + 1) * layers - 1,
        }  # fmt: skip
        if geometry.mla:
            self.device = MLATokenToKVPool(kv_lora_rank=32, qk_rope_head_dim=16, **common)
        else:
            self.device = MHATokenToKVPool(head_num=geometry.heads, head_dim=16, **common)
        self.allocator = PagedTokenToKVPoolAllocator(
            size=size, page_size=geometry.page_size, dtype=geometry.dtype, device="cpu",
            kvcache=self.device, need_sort=False,
        )  # fmt: skip
        requests = ReqToTokenPool(
            size=8, max_context_len=size, device="cpu", enable_memory_saver=False
        )
        params = CacheInitParams(
            disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=self.allocator,
            page_size=geometry.page_size, tree_components=(ComponentType.FULL,),
            pp_rank=at.pp, pp_size=at.pp_size,
            tp_cache_group=at.group if at.tp_size > 1 else None,
            pp_cache_group=at.group if at.pp_size > 1 else None,
        )  # fmt: skip
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(args, params)
        # A tree that a test forgot must not be closed when the interpreter ends.
        atexit.unregister(self.cache.shutdown)
        self.cache.load_back_threshold = 0  # by default short prefixes stay where they are

    def _publish(self) -> ServerArgs:
        """Tells sglang in this process what it is to run; returns its arguments."""
        at, geometry = self.position, self.geometry
        # sglang reads a hit of fewer tokens than the threshold not at all, 256 by default.
        extra = {"prefetch_threshold": geometry.page_size, **(self.extra or {})}
        args = ServerArgs(
            model_path=str(self.model), served_model_name="tiny/model", device="cpu",
            page_size=geometry.page_size, tp_size=at.tp_size, pp_size=at.pp_size,
            attention_backend="torch_native", disable_cuda_graph=True,
            enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_io_backend=geometry.io,
            hicache_mem_layout=geometry.layout, hicache_write_policy="write_through",
            hicache_storage_backend="file" if self.extra is None else "dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(extra),
        )  # fmt: skip
        get_parallel().clear_stamp()  # of the rank that was here before
        set_global_server_args_for_scheduler(args)
        get_parallel().override_permanently(
            tp_rank=at.tp, pp_rank=at.pp, attn_tp_rank=at.tp, attn_dp_rank=0, attn_dcp_rank=0
        )
        return args

    @property
    def backend(self) -> Any:
        """The storage backend that the controller made."""
        return self.cache.cache_controller.storage_backend

    @property
    def host(self) -> Any:
        """The host pool: L2."""
        return self.cache.cache_controller.storage_host_pool

    @property
    def host_free(self) -> int:
        """Tokens of L2 that nobody holds."""
        return int(self.host.available_size())

    def layers(self) -> dict[str, torch.Tensor]:
        """Returns L1 by layer, each as bytes of shape (tokens, bytes a token)."""
        if self.geometry.mla:
            found = {f"layer {i}": buffer for i, buffer in enumerate(self.device.kv_buffer)}
        else:
            found = {f"layer {i} K": buffer for i, buffer in enumerate(self.device.k_buffer)}
            found |= {f"layer {i} V": buffer for i, buffer in enumerate(self.device.v_buffer)}
        return {name: b.view(torch.uint8).view(b.shape[0], -1) for name, b in found.items()}

    # -- what a scheduler does ----------------------------------------------------------------

    def insert(self, prompt: Sequence[int], *, seed: int = 0) -> dict[str, torch.Tensor]:
        """Puts a prompt's KV into L1, as a forward pass would, and returns what L1 holds of it.

        The bytes are random, but for one seed and prompt always the same. A prefix that is there
        already keeps its own.
        """
        known = self._match(prompt).device_prefix_len
        rows = self.allocator.alloc(len(prompt) - known).to(torch.int64)
        random = torch.Generator().manual_seed(seed)
        for layer in self.layers().values():
            shape = (len(prompt), layer.shape[1])
            layer[rows] = torch.randint(256, shape, dtype=torch.uint8, generator=random)[known:]
        before = self.cache.path_device_indices(self._match(prompt).last_device_node)
        self.cache.insert(InsertParams(key=_key(prompt), value=torch.cat([before, rows])))
        return self.held(prompt)

    def held(self, prompt: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns what L1 holds of a prompt, by layer; as many tokens as it holds."""
        rows = self.cache.path_device_indices(self._match(prompt).last_device_node)
        return {name: layer[rows].clone() for name, layer in self.layers().items()}

    def backup(self) -> None:
        """Waits until everything in L1 is in L2 and L3 as well."""
        controller = self.cache.cache_controller
        self.pump(
            lambda: (
                not (
                    self.cache.ongoing_write_through
                    or self.cache.ongoing_backup
                    or controller.write_queue
                )
            )
        )

    def wipe(self) -> None:
        """Forgets L1 and L2, and fills their memory with other bytes."""
        self.cache.reset()
        self.allocator.clear()
        for layer in self.layers().values():
            layer.fill_(0xA5)
        buffers = self.host.kv_buffer
        for buffer in [buffers] if isinstance(buffers, torch.Tensor) else buffers:
            buffer.view(torch.uint8).fill_(0x5A)

    def start_prefetch(self, prompt: Sequence[int], rid: str = "r0") -> CacheRequestHandle:
        """Asks for what L1 and L2 lack of a prompt, as for a request that waits for it."""
        handle, match = CacheRequestHandle(rid, 0), self._match(prompt)
        node = match.last_host_node
        known = match.device_prefix_len + match.host_hit_length
        before = None
        if self.cache.hicache_storage_pass_prefix_keys:
            before = self.cache.get_prefix_hash_values(node)
        self.cache.prefetch_from_storage(
            handle, node, array("q", prompt[known:]), self.cache.get_last_hash_value(node), before,
            matched_prefix_tokens=array("q", prompt[:known]),
        )  # fmt: skip
        return handle

    def finish_prefetch(self, handle: CacheRequestHandle) -> int:
        """Waits for a prefetch; returns the tokens that came from L3 into L2."""
        self.pump(lambda: self.cache.check_prefetch_progress(handle))
        return int(self.cache.pop_prefetch_loaded_tokens(handle))

    def prefetch(self, prompt: Sequence[int], rid: str = "r0") -> int:
        """Returns the tokens of a prompt that came from L3 into L2."""
        return self.finish_prefetch(self.start_prefetch(prompt, rid))

    def load_back(self, prompt: Sequence[int]) -> dict[str, torch.Tensor]:
        """Copies what L2 holds of a prompt into L1; returns what L1 holds then, by layer."""
        match = self._match(prompt)
        request = SimpleNamespace(
            rid="load", cache_request_handle=CacheRequestHandle("load", 0), kv=ReqKvInfo(),
            last_node=match.last_device_node, prefix_len=match.device_prefix_len,
            swa_host_hit_length=0, mamba_host_hit_length=0, priority=0, lock=None,
        )  # fmt: skip
        self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node,
                host_hit_length=match.host_hit_length,
                req=request,
            )
        )
        self.cache.ready_to_load_host_cache()
        self.pump(lambda: not self.cache.cache_controller.ack_load_queue)
        return self.held(prompt)

    def pump(self, done: Callable[[], bool]) -> None:
        """Steps as the scheduler's loop does, until `done`, and once more."""
        end = time.monotonic() + SECONDS
        while not self.position.agree(done()):
            self.cache.check_hicache_events()
            if time.monotonic() > end:
                raise TimeoutError("the cache did not come to rest")
            time.sleep(0.001)
        self.cache.check_hicache_events()

    def close(self) -> None:
        """Ends the threads and closes the storage backend."""
        self.cache.shutdown()

    def _match(self, prompt: Sequence[int]) -> MatchResult:
        return self.cache.match_prefix(MatchPrefixParams(key=_key(prompt)))


def _key(prompt: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", prompt))
