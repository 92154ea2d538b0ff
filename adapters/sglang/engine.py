"""What the adapter reads from SGLang, beyond what SGLang hands it: all of it is here.

Read on the scheduler's main thread, at attach. `HiCacheStorageConfig` tells ranks and the served
name alone; weights, logical dtype and the cut of the pipeline stages stand in the server arguments
of the process and in the model's configuration. SGLang keeps its arguments as they were given, and
what it made of them in namespaces beside (`get_model`, ...): the engine runs by these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.runtime_context import (
    get_lora,
    get_model,
    get_parallel,
    get_server_args,
    get_spec,
)

from l3store.adapters.sglang import updates
from l3store.adapters.sglang.weights import fingerprint
from l3store.errors import ConfigError
from l3store.keys import Coordinate

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from l3store.adapters.sglang.options import SGLangOptions

__all__ = ["Engine", "look"]

_attached_at: dict[str | None, int] = {}
"""Values of option 'weights_revision' in this process -> updates of the weights before the first
attach with it."""

_WHILE_LOADING = ("modelopt_quant", "rl_quant_profile")
"""Arguments that quantize weights while they are loaded, beside ``--quantization``."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What this rank's engine runs, as far as it decides whose bytes are exchangeable."""

    model: str
    at: Coordinate
    kv_cache_dtype: str
    """``--kv-cache-dtype``; ``auto`` where it follows from the model."""
    draft_kv_cache_dtype: str
    """The same of the draft model."""
    quantization: str | None
    stages: tuple[int, ...] | None
    weights_revision: str
    draft_revision: str | None
    context_order: str
    """How prefill context parallelism deals tokens to ranks; "" without it."""
    rocm: bool
    """ROCm's fp8 encodings are others of the same names."""
    replicated: bool
    """Every TP rank holds the same KV, and TP rank 0 alone writes it (MLA)."""
    head_groups: int
    """Head groups of a page over all ranks (``tp_lcm_size`` with the layout page_head); 0: none."""


def look(config: HiCacheStorageConfig, options: SGLangOptions) -> Engine:
    """Returns what the engine of this process runs. Blocks for reads of the model's files.

    Raises:
        ConfigError: Something that decides the identity of pages cannot be known, or is a
            combination that SGLang itself never writes or reads back right.
    """
    model, spec = get_model(), get_spec()
    if config.dcp_size > 1:
        raise ConfigError(
            "decode context parallelism: SGLang allows it for its own file and mooncake only"
        )
    at = _coordinate(config)
    return Engine(
        model=_name(config.model_name or model.model_path),
        at=at,
        kv_cache_dtype=str(model.kv_cache_dtype),
        draft_kv_cache_dtype=str(spec.speculative_draft_kv_cache_dtype or model.kv_cache_dtype),
        quantization=model.quantization,
        stages=_stages(config, options),
        weights_revision=_running_revision(model, options.weights_revision),
        draft_revision=options.draft_revision
        or (
            _revision(spec.speculative_draft_model_path, spec.speculative_draft_model_revision)
            if spec.speculative_draft_model_path
            else None
        ),
        context_order=str(get_parallel().cp_strategy or "") if at.cp_size > 1 else "",
        rocm=torch.version.hip is not None,
        replicated=config.is_mla_model,
        head_groups=_head_groups(config),
    )


def _name(served: str) -> str:
    """Returns a served name as it is, and a folder's own name: where it lies is no matter."""
    return Path(served).absolute().name if served.startswith(("/", ".")) else served


def _coordinate(config: HiCacheStorageConfig) -> Coordinate:
    tp, tp_size = config.tp_rank, config.tp_size
    if config.attn_cp_size > 1 and not is_dp_attention_enabled():
        if config.is_mla_model:
            raise ConfigError(
                "context parallelism of an MLA model without --enable-dp-attention: SGLang lets "
                "TP rank 0 write alone, so the parts of all other ranks would never be stored"
            )
        tp_size //= config.attn_cp_size  # here SGLang counts TP ranks over CP ranks
        tp %= tp_size
    return Coordinate(
        pp=config.pp_rank,
        pp_size=config.pp_size,
        cp=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
        tp=tp,
        tp_size=tp_size,
    )


def _stages(config: HiCacheStorageConfig, options: SGLangOptions) -> tuple[int, ...] | None:
    size = config.pp_size
    if options.stages is not None and len(options.stages) != size:
        raise ConfigError(f"option 'stages' names {len(options.stages)} stages, not {size}")
    if size == 1:
        if options.stages is not None:
            raise ConfigError("option 'stages': there is one stage, which needs no naming")
        return None
    told = options.stages
    try:
        layers = _configuration("stages").num_hidden_layers
    except ConfigError:
        if told is None:
            raise
        return told
    bounds = [get_pp_indices(layers, rank, size) for rank in range(size)]
    cut = tuple(end - start for start, end in bounds)
    if told not in (None, cut):
        raise ConfigError(f"option 'stages' says {told}, but the engine's stages are {cut}")
    return cut


def _head_groups(config: HiCacheStorageConfig) -> int:
    groups = config.tp_lcm_size
    if not groups or config.is_mla_model:
        return 0
    if groups < 0:  # SGLang itself takes any multiple of the TP size
        raise ConfigError(f"tp_lcm_size must be positive, not {groups}")
    heads = _configuration("").get_total_num_kv_heads()
    if groups > heads:
        raise ConfigError(
            f"tp_lcm_size {groups}: the model has {heads} KV heads, and a head that several ranks "
            f"hold cannot be told from heads of their own; at most {heads}, or without tp_lcm_size"
        )
    return int(groups)


def _configuration(option: str) -> Any:
    args = get_server_args()
    try:
        return ModelConfig.from_server_args(args)
    except Exception as error:  # whatever a remote or unknown configuration raises
        instead = f"; tell option {option!r}" if option else ""
        raise ConfigError(
            f"the configuration of model {args.model_path!r} cannot be read{instead}: {error}"
        ) from error


def _running_revision(model: Any, told: str | None) -> str:
    happened = updates.seen()
    if happened.unnamed and not told:
        raise ConfigError(
            "the weights were updated without a weight_version, or an update failed, so nobody can "
            "say which these are: tell option 'weights_revision'"
        )
    since = _attached_at.setdefault(told, happened.count)
    if happened.unnamed and since != happened.count:
        raise ConfigError(
            f"option 'weights_revision' says {told!r}, as before the weights were updated: "
            "tell another"
        )
    found = [told or _loaded_revision(model)]
    if model.json_model_override_args not in (None, "", "{}"):
        found.append(f"override {model.json_model_override_args}")
    found += [f"{name} {told}" for name in _WHILE_LOADING if (told := getattr(model, name))]
    if model.quantization_param_path:  # scales of fp8 KV
        found.append(f"scales {fingerprint(Path(model.quantization_param_path))}")
    if happened.version not in (None, updates.UNVERSIONED):
        found.append(f"version {happened.version}")
    # SGLang names an adapter of --lora-paths by its name and path alone, and page hashes by that.
    found += sorted(
        f"adapter {one.lora_id} {_revision(one.lora_path, None)}"
        for one in get_lora().lora_paths or ()
    )
    return ", ".join(found)


def _loaded_revision(model: Any) -> str:
    if model.load_format == "dummy":  # random weights, whatever the files say
        return f"random, seed {get_server_args().random_seed}"
    if model.load_format == "remote_instance":
        raise ConfigError(
            "--load-format remote_instance takes the weights from another engine, as updated as "
            "they are there, so the files do not say which these are: tell option "
            "'weights_revision'"
        )
    return _revision(model.model_path, model.revision)


def _revision(model: str, revision: str | None) -> str:
    folder = _folder(model, revision)
    try:
        found = folder and fingerprint(folder)
    except OSError as error:
        raise ConfigError(
            f"weights of {model!r} cannot be read for their fingerprint; "
            f"tell option 'weights_revision': {error}"
        ) from error
    return f"files {found}" if found else f"path {model} revision {revision}"


def _folder(model: str, revision: str | None) -> Path | None:
    """Returns where the files of a model are on this machine, without fetching anything."""
    if Path(model).exists():
        return Path(model)
    for cache in dict.fromkeys((get_model().download_dir, None)):  # as SGLang looks for them
        try:
            from huggingface_hub import snapshot_download

            return Path(
                snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
            )
        except Exception:  # not a name of the hub, or nothing fetched: the path has to do
            continue
    return None
