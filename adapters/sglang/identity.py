"""Whose bytes are exchangeable: the descriptor and the shards of one host pool's pages."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from l3store.errors import ConfigError
from l3store.keys import Descriptor, PlaceDescriptor, head_group_shards, shard_name

if TYPE_CHECKING:
    from l3store.adapters.sglang.engine import Engine
    from l3store.adapters.sglang.options import SGLangOptions
    from l3store.adapters.sglang.pools import Copied, InPlace, Kind

__all__ = ["BYTE_ORDER", "Identity", "groups_of", "identify"]

BYTE_ORDER = {
    "layer_first": "k_then_v/layer/token/head",
    "page_first_direct": "k_then_v/layer/token/head",
    "page_first": "k_then_v/token/layer/head",
    "page_head": "k_then_v/head/token/layer",
}
"""Layout of a host pool -> order of the bytes of its flat page, which is the order in the store."""

_OPAQUE = "layer/page"
"""Order of pools whose layers are opaque pages, in every layout."""
_RAW = {"uint8", "int8"}
"""What pools say whose real dtype torch, or their copy kernels, cannot name."""


class Identity(NamedTuple):
    """The names of one pool's pages on this rank, and what they stand for."""

    descriptor: Descriptor
    shards: list[str]
    """One; with head groups one for each group of this rank."""
    places: list[PlaceDescriptor]
    """One a shard."""


def groups_of(engine: Engine, name: str, pool: Any, kind: Kind) -> int:
    """Returns into how many objects, by heads, this rank's pages of `pool` are cut.

    Raises:
        ConfigError: Head groups are asked for in another layout than page_head, or do not divide
            the heads of this rank.
    """
    if not _in_groups(engine, name, kind):
        return 1
    if pool.layout != "page_head":
        raise ConfigError(f"tp_lcm_size needs --hicache-mem-layout page_head, not {pool.layout!r}")
    groups = len(head_group_shards(engine.at, engine.head_groups))
    if pool.head_num % groups:
        raise ConfigError(
            f"tp_lcm_size {engine.head_groups}: the {pool.head_num} KV heads of a rank cannot be "
            f"cut into {groups} groups"
        )
    return groups


def identify(
    engine: Engine,
    options: SGLangOptions,
    name: str,
    pool: Any,
    kind: Kind,
    pages: InPlace | Copied,
    page_size: int,
) -> Identity:
    """Returns the identity of the pages of `pool` on this rank.

    Args:
        engine: What this rank runs.
        options: The operator's words.
        name: The pool's name in SGLang: ``kv``, ``indexer``, ``mamba``, ...
        pool: The host pool.
        kind: What it is.
        pages: How its pages move, one part a head group.
        page_size: Tokens of a page of the prefix tree.

    Raises:
        ConfigError: The logical dtype is not known or contradicts the option, or SGLang would not
            write all parts of this pool.
    """
    draft = name.startswith("draft")
    partial = kind.cut == "tp" and kind.name != "mamba"  # of Mamba SGLang lets all ranks write
    if partial and engine.replicated and engine.at.tp_size > 1:
        raise ConfigError(
            f"pool {name!r}: of an MLA model SGLang lets TP rank 0 alone back it up, but each TP "
            "rank holds another part of it; start without L3, or without the "
            f"{'draft' if draft else 'pool'}"
        )
    if _in_groups(engine, name, kind):
        shards = head_group_shards(engine.at, engine.head_groups)
    else:
        shards = [shard_name(engine.at, kind.cut)]
    heads, first_head = 1, 0
    if kind.name == "mha":
        heads, first_head = pool.head_num // len(shards), engine.at.tp * pool.head_num
    layers, packed_draft = _layers(pool, kind)
    order = BYTE_ORDER[pool.layout] if kind.rows else _OPAQUE
    orders = (order, _device_order(pool), engine.context_order)
    descriptor = Descriptor(
        model=engine.model,
        dtype=_dtype(engine, options, name, pool, kind),
        page_size=page_size,
        physical_page_size=None if pages.page_tokens == page_size else pages.page_tokens,
        pool=name,
        pool_class=kind.name,
        layers=layers,
        heads=heads,
        dims=_dims(pool, kind),
        page_bytes=sum(pages.segment_bytes()),
        byte_order="/".join(filter(None, orders)),
        stages=engine.stages,
        weights_revision=engine.weights_revision,
        draft_revision=engine.draft_revision if draft or packed_draft else None,
        quantization=engine.quantization,
        tag=options.tag,
    )
    first_layer = getattr(pool, "start_layer", 0) or 0
    places = [
        PlaceDescriptor(
            layer_start=first_layer,
            layer_end=first_layer + layers,
            head_start=first_head + part * heads,
            head_end=first_head + (part + 1) * heads,
            segments=pages.segment_bytes(part),
        )
        for part in range(len(shards))
    ]
    return Identity(descriptor, shards, places)


def _in_groups(engine: Engine, name: str, kind: Kind) -> bool:
    return engine.head_groups > 0 and name == "kv" and kind.cut == "tp"


def _layers(pool: Any, kind: Kind) -> tuple[int, bool]:
    """Returns the layers of an object, and whether those of a draft model are among them."""
    if kind.name == "mamba":
        return pool.num_mamba_layers, bool(pool.mtp_draft_buffer_infos)
    if kind.name.startswith("deepseek_v4"):  # do not tell: any of them may hold a draft's layers
        return pool.layer_num, True
    return pool.layer_num, pool.layer_num > getattr(pool, "target_layer_num", pool.layer_num)


def _device_order(pool: Any) -> str:
    """Returns how tokens lie in a page of the device, which the host copies as it is.

    "" for the usual order, token by token; ``hnd`` (SGLANG_USE_HND_KVCACHE) and ``vectorized_5d``
    (ROCm) have the same bytes in another order.
    """
    layouts = {info.buffers.layout.value for info in getattr(pool, "_buffer_infos", ())}
    return "+".join(sorted(layouts - {"nhd"}))


def _dims(pool: Any, kind: Kind) -> tuple[int, ...]:
    """Returns the sizes of one token's entry, or of one page of a layer where that is opaque."""
    if kind.name == "mha":
        return pool.head_dim, pool.v_head_dim
    if kind.name == "mla":
        return pool.kv_lora_rank, pool.qk_rope_head_dim, pool.kv_cache_dim
    if kind.name == "dsa_indexer":
        return (pool.indexer_page_stride_size,)
    if kind.name == "mamba":
        shapes = [tuple(pool.temporal_state_shape), *map(tuple, pool.conv_state_shapes)]
        sides = [tuple(state.shape[1:]) for state in pool.slot_state_device_tensors]
        # Each with its rank before it, so that two shapes never run together.
        return tuple(chain.from_iterable((len(shape), *shape) for shape in shapes + sides))
    return (pool.size_per_token,)


def _dtype(engine: Engine, options: SGLangOptions, name: str, pool: Any, kind: Kind) -> str:
    """Returns the logical dtype: never the raw one that several encodings share."""
    fnuz = "fnuz" if engine.rocm else ""
    if kind.name == "dsa_indexer":  # fp8 keys and fp32 scales; what else it may be has other sizes
        return f"fp8_e4m3{fnuz}+float32"
    if kind.name == "mamba":
        return f"{_word(pool.temporal_dtype)}+{_word(pool.conv_dtype)}"
    found = _word(pool.dtype)
    if found not in _RAW:
        if options.dtype not in (None, found) and name == "kv":
            raise ConfigError(f"option 'dtype' says {options.dtype!r}, but the pool is {found!r}")
        return found
    told = engine.draft_kv_cache_dtype if name.startswith("draft") else engine.kv_cache_dtype
    if options.dtype and name == "kv" and told not in ("auto", options.dtype):
        raise ConfigError(
            f"option 'dtype' says {options.dtype!r}, but the engine runs with "
            f"--kv-cache-dtype {told}"
        )
    logical = told if told != "auto" else options.dtype
    if logical is None or logical in _RAW:
        raise ConfigError(
            f"pool {name!r} says {found!r}, which both fp8 kinds say: tell --kv-cache-dtype "
            "(fp8_e4m3 or fp8_e5m2), or option 'dtype'"
        )
    return logical + fnuz


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
