"""The facts: all of sglang that the adapter overrides, calls, reads, or relies on."""

from __future__ import annotations

import ast
import sys
from array import array
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from drift import (
    Fact,
    Names,
    assigned,
    attributes,
    fields,
    function,
    members,
    methods,
    sources,
    takes,
    trees,
    value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["FACTS"]

STORAGE = "sglang.srt.mem_cache.hicache_storage"
CONTROLLER = "managers/cache_controller.py"
HYBRID = "mem_cache/hybrid_cache/hybrid_cache_controller.py"
TREE = "mem_cache/unified_radix_cache.py"
FACTORY = "mem_cache/storage/backend_factory.py"

_READS = "adapters/sglang/engine.py reads"
_THERE = "there"


# -- readers that know sglang ----------------------------------------------------------------------


def calls_of_the_backend(texts: dict[str, str]) -> Names:
    """What sglang calls on a storage backend, and with how many arguments or which by name."""
    found: dict[str, set[str]] = {}
    for node in trees(texts):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        held_by = node.func.value
        name = getattr(held_by, "attr", None) or getattr(held_by, "id", None)
        if name == "storage_backend":
            named = [keyword.arg or "**" for keyword in node.keywords]
            told = ", ".join([str(len(node.args)), *named])
            found.setdefault(node.func.attr, set()).add(told)
    return {method: " or ".join(sorted(ways)) for method, ways in sorted(found.items())}


def extra_config_keys(texts: dict[str, str]) -> Names:
    """What sglang reads from extra_config and puts there, and whether it takes it out."""
    found = {}
    for node in trees(texts):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            held_by = ast.unparse(node.func.value)
            how = {"pop": "taken out", "get": "read", "setdefault": "put"}.get(node.func.attr)
            if how and held_by.endswith("extra_config") and isinstance(node.args[0], ast.Constant):
                found[node.args[0].value] = how
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "required_fields":
            found |= dict.fromkeys(ast.literal_eval(node.value), "required")
    return found


def made_by_the_factory(factory: Any) -> Names:
    """How the factory constructs a class that it loads by name."""
    given: list[Any] = []

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

    class Recorder(HiCacheStorage):
        get = batch_get = set = batch_set = exists = None

        def __init__(self, *args: Any, **kw: Any) -> None:
            given.extend((args, kw))

    module = ModuleType("drift_recorder")
    module.Recorder = Recorder  # type: ignore[attr-defined]
    sys.modules["drift_recorder"] = module
    names = {
        "backend_name": "x", "module_path": "drift_recorder", "class_name": "Recorder",
    }  # fmt: skip
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "m", extra_config=names)
    try:
        factory.create_backend("dynamic", config, None)
    finally:
        del sys.modules["drift_recorder"]
    args, kw = given
    told = ["the configuration" if arg is config else repr(arg) for arg in args]
    return {"constructor": ", ".join(told + [f"{k}={v!r}" for k, v in kw.items()])}


def writers(controller: Any) -> Names:
    """Who backs a pool up when TP ranks hold the same KV: TP rank 0, or every rank."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    second = SimpleNamespace(
        backup_skip=True,
        storage_backend_type="dynamic",
        mem_pool_host=SimpleNamespace(entry_map={}),
    )
    return {
        name.value: "every rank"
        if controller.should_backup(second, PoolTransfer(name=name))
        else "TP rank 0"
        for name in PoolName
    }


def writes(config: Any) -> Names:
    """Which ranks back KV up."""
    told = {}
    for kind, mla in (("MHA", False), ("MLA", True)):
        for tp in (0, 1):
            one = config(tp, 2, 0, 1, 0, 1, mla, False, True, "m")
            told[f"{kind} on TP rank {tp}"] = str(one.is_storage_writer)
    return told


def page_hashes(hashed: Any) -> Names:
    """How a prompt's pages are called: golden values, and what the seed holds."""

    from sglang.srt.mem_cache.radix_cache import RadixKey

    def first(**seed: str) -> str:
        return hashed(RadixKey(array("q", [1, 2]), **seed), None, page_size=2)[0]

    one, two = hashed([1, 2, 3, 4], None, page_size=2)
    return {
        "first": one,
        "second": two,
        "salt": "another" if first(cache_salt="s") != one else "the same",
        "adapter": "another"
        if first(extra_key="s") not in (one, first(cache_salt="s"))
        else "same",
    }


def dcp_backends(texts: dict[str, str]) -> Names:
    """The storage backends that sglang lets decode context parallelism have."""
    for node in _of_function("attach_storage_backend", texts):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "storage_backend":
            return {"backends": ast.unparse(node.comparators[0])}
    return {}


def _of_function(name: str, texts: dict[str, str]) -> Iterable[ast.AST]:
    for node in trees(texts):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield from ast.walk(node)


def replicated_by(texts: dict[str, str]) -> Names:
    """The device pools whose KV all TP ranks hold alike."""
    return {
        ast.unparse(node.args[1]): "replicated"
        for node in _of_function("_generate_storage_config", texts)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
    }


def ranks_told(texts: dict[str, str]) -> Names:
    """What the configuration's ranks are, with DP attention and without."""
    found = {}
    for node in _of_function("_generate_storage_config", texts):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "is_dp_attention_enabled()":
            for when, block in (("with", node.body), ("without", node.orelse)):
                for one in block:
                    if isinstance(one, ast.Assign):
                        key = f"{ast.unparse(one.targets[0])} {when} DP attention"
                        found[key] = ast.unparse(one.value)
    return found


def updates_of_weights(texts: dict[str, str]) -> Names:
    """Whether each way to update weights tells of it in the method that the adapter wraps."""
    return {
        node.name: str("self.record_weight_version_after_update(" in ast.unparse(node))
        for node in trees(texts)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("update_weights_from_")
    }


def host_pool_classes(texts: dict[str, str]) -> Names:
    """All host pools."""
    return {
        node.name: ", ".join(ast.unparse(base) for base in node.bases) or "no base"
        for node in trees(texts)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("PoolHost", "HostPool", "Host"))
    }


def _bag(name: str) -> Callable[[], Any]:
    """Returns what loads a namespace of what sglang made of its arguments."""

    def load() -> Any:
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
        import sglang.srt.runtime_context as context

        return getattr(context, name)()

    return load


def bag(name: str, *leaves: str, uses: str = _READS, label: str = "") -> Fact:
    return Fact(
        of=f"sglang.srt.runtime_context:{name}()", load=_bag(name), look=attributes(*leaves),
        label=label, said=dict.fromkeys(leaves, _THERE), uses=uses,
        then="Find where it stands now: whose bytes are exchangeable depends on it.",
    )  # fmt: skip


def _host_pools(builder: str, *args: Any, **kw: Any) -> Callable[[], Any]:
    def build() -> Any:
        import host_pools

        return getattr(host_pools, builder)(*args, **kw)

    return build


def pool(name: str, build: Callable[[], Any], *geometry: str, more: Names | None = None) -> Fact:
    """What is read of a host pool, and how it tells where pages lie."""
    told = dict.fromkeys((*geometry, "layout", "page_size", "size"), _THERE)
    told |= {
        "get_page_buffer_meta": "(indices)",
        "get_data_page": "(index, flat=True)",
        "get_dummy_flat_data_page": "()",
        "set_from_flat_data_page": "(index, data_page)",
    }
    told |= more or {}
    return Fact(
        of=f"host pool {name}", load=build, look=attributes(*told), said=told,
        uses="adapters/sglang/pools.py or identity.py uses",
        then="Mend tests/sglang/support/host_pools.py if it cannot be built; then test_pools.py "
             "says whether its pages lie as they did.",
    )  # fmt: skip


_NAMES = (
    "kv", "mamba", "swa", "auxiliary_swa", "indexer", "deepseek_v4_c1", "deepseek_v4_c1_indexer",
    "deepseek_v4_c1_indexer_scale", "deepseek_v4_c2", "deepseek_v4_c2_indexer",
    "deepseek_v4_c2_indexer_scale", "deepseek_v4_c4", "deepseek_v4_c4_indexer",
    "deepseek_v4_c4_indexer_scale", "deepseek_v4_c128", "deepseek_v4_c4_rope",
    "deepseek_v4_c128_rope", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state",
    "deepseek_v4_c128_state", "draft", "draft_indexer", "draft_swa",
)  # fmt: skip
_MHA = ("dtype", "layer_num", "target_layer_num", "start_layer", "head_num", "head_dim",
        "v_head_dim", "logical_page_size", "_buffer_infos")  # fmt: skip
_SPLIT = {"get_split_heads_page_buffer_meta": "(indices, split_factor)"}

FACTS = [
    # -- what is overridden
    Fact(
        of=f"{STORAGE}:HiCacheStorage", look=methods, uses="adapters/sglang/hicache.py overrides",
        said={
            "batch_exists": "(self, keys, extra_info=None)",
            "batch_exists_v2": "(self, keys, pool_transfers=None, extra_info=None)",
            "batch_get": "abstract (self, keys, target_locations=None, target_sizes=None)",
            "batch_get_v1": "(self, keys, host_indices, extra_info=None)",
            "batch_get_v2": "(self, transfers, extra_info=None)",
            "batch_set": "abstract (self, keys, values=None, target_locations=None, "
                         "target_sizes=None)",
            "batch_set_v1": "(self, keys, host_indices, extra_info=None)",
            "batch_set_v2": "(self, transfers, extra_info=None)",
            "clear": "(self)",
            "exists": "abstract (self, key)",
            "get": "abstract (self, key, target_location=None, target_sizes=None)",
            "get_stats": "(self)",
            "on_host_pools_registered": "(self)",
            "register_mem_host_pool_v2": "(self, host_pool, host_pool_name)",
            "register_mem_pool_host": "(self, mem_pool_host)",
            "set": "abstract (self, key, value=None, target_location=None, target_sizes=None)",
        },
        then="Give L3StoreHiCache the same parameters.",
        new="L3StoreHiCache must have it if it is abstract or the controller calls it.",
    ),
    Fact(
        of="storage_backend", look=calls_of_the_backend,
        load=lambda: sources(holding="storage_backend."),
        uses="adapters/sglang/hicache.py answers",
        said={
            "batch_exists": "2", "batch_exists_v2": "3", "batch_get": "2", "batch_get_v1": "3",
            "batch_get_v2": "1, extra_info", "batch_set": "2", "batch_set_v1": "3",
            "batch_set_v2": "1, extra_info", "clear": "0", "close": "0", "get_stats": "0",
            "on_host_pools_registered": "0", "register_mem_host_pool_v2": "2",
            "register_mem_pool_host": "1",
            # Behind a test for sglang's own Mooncake store.
            "describe_l3_object_layout": "0, sidecar_pool_specs, swa_trailing_pages, page_size",
        },
        then="Look whether L3StoreHiCache takes the arguments of the call.",
        new="L3StoreHiCache must answer this call, unless it is only for a backend of sglang's.",
    ),
    Fact(
        of="sglang.srt.mem_cache.storage:StorageBackendFactory", look=made_by_the_factory,
        said={"constructor": "the configuration, {}"},
        uses="adapters/sglang/hicache.py L3StoreHiCache is made by",
        then="L3StoreHiCache.__init__ must take these arguments.",
    ),
    Fact(
        of="extra_config", look=extra_config_keys,
        load=lambda: sources(CONTROLLER, HYBRID, FACTORY, TREE),
        uses="adapters/sglang/options.py ENGINE_OPTIONS and docs/sglang.md name",
        said={
            "backend_name": "required", "module_path": "required", "class_name": "required",
            "interface_v1": "read", "tp_lcm_size": "taken out",
            "prefetch_threshold": "taken out", "prefetch_timeout_base": "taken out",
            "prefetch_timeout_per_ki_token": "taken out",
            "hicache_storage_pass_prefix_keys": "taken out",
            "file_storage_path": "put",  # by --file-storage-path, whatever the backend
        },
        then="An option that does nothing must not be told to users.",
        new="Add it to ENGINE_OPTIONS, or the adapter refuses it as unknown.",
    ),
    # -- what is handed over
    Fact(
        of=f"{STORAGE}:HiCacheStorageConfig", look=fields, uses=_READS,
        said={
            "tp_rank": "required", "tp_size": "required", "pp_rank": "required",
            "pp_size": "required", "attn_cp_rank": "required", "attn_cp_size": "required",
            "is_mla_model": "required", "enable_storage_metrics": "required",
            "is_page_first_layout": "required", "model_name": "required", "tp_lcm_size": "None",
            "should_split_heads": "False", "dp_rank": "0", "extra_config": "None",
            "dcp_size": "1", "dcp_rank": "0", "logical_page_size": "None",
        },
        then="Ranks that cannot be told apart would share names of different pages.",
        new="If ranks that differ in it hold different bytes, it belongs into `_coordinate` of "
            "engine.py, or must be refused.",
    ),
    Fact(
        of=f"{STORAGE}:HiCacheStorageExtraInfo", look=fields,
        uses="adapters/sglang/hicache.py reads", said={"prefix_keys": "None", "extra_info": "None"},
        then="`prefix_keys` tells a page's parent and depth.",
        new="Look whether it tells something of pages that the store should know.",
    ),
    Fact(
        of=f"{STORAGE}:PoolTransfer", look=fields, uses="adapters/sglang/hicache.py reads",
        said={
            "name": "required", "host_indices": "None", "device_indices": "None", "keys": "None",
            "hit_policy": "'all_pages'", "nodes_to_load": "None", "indices_from_pool": "None",
            "block_pages": "0", "group_pages": "0",
        },
        then="The v2 calls of L3StoreHiCache read it.",
        new="Look whether it changes which pages the v2 calls mean.",
    ),
    Fact(
        of=f"{STORAGE}:PoolTransferResult", look=fields,
        uses="adapters/sglang/hicache.py answers with",
        said={"kv_hit_pages": "required", "extra_pool_hit_pages": "required",
              "restorable_prefix_pages": "None"},
        then="batch_exists_v2 of L3StoreHiCache makes it, by position.",
        new="batch_exists_v2 of L3StoreHiCache should fill it.",
    ),
    Fact(
        of=f"{STORAGE}:PoolHitPolicy", look=members, uses="adapters/sglang/hicache.py knows",
        said={"ALL_PAGES": "'all_pages'", "TRAILING_PAGES": "'trailing_pages'",
              "BLOCK_GROUPS": "'block_groups'"},
        then="batch_exists_v2 and prefixes.py go by it.",
        new="batch_exists_v2 takes it for all_pages, which may promise pages that are of no use.",
    ),
    Fact(
        of=f"{STORAGE}:PoolName", look=members, uses="adapters/sglang/hicache.py names places by",
        said={name.upper(): repr(name) for name in _NAMES},
        then="Pages in the store stand under the old name.",
        new="Drafts are known in identity.py by names that start with 'draft'; else nothing to do.",
    ),
    Fact(
        of="sglang.srt.observability.metrics_collector:StorageMetrics", look=fields,
        uses="adapters/sglang/hicache.py get_stats fills",
        said=dict.fromkeys(("prefetch_pgs", "backup_pgs", "prefetch_bandwidth",
                            "backup_bandwidth"), "made"),
        then="get_stats must fill what there is.", new="get_stats could fill it.",
    ),
    # -- what the controller does
    Fact(
        of=f"{STORAGE}:STORAGE_BATCH_SIZE", look=value, said={"value": "128"},
        uses="adapters/sglang/hicache.py and docs/sglang.md say the most pages of a call:",
        then="Say the new number there; benchmarks read in batches of it.",
    ),
    Fact(
        of="sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController",
        label="writer", look=writers,
        uses="adapters/sglang/identity.py relies on",
        said={name: "every rank" if name == "mamba" else "TP rank 0" for name in _NAMES},
        then="A pool that TP cuts and TP rank 0 alone writes never hits on other ranks: refuse it "
             "as `identify` does with drafts, or no longer.",
        new="Say here who writes it.",
    ),
    Fact(
        of="replicated pools", look=replicated_by,
        load=lambda: sources(CONTROLLER), uses="adapters/sglang/pools.py _KINDS is cut by",
        said={"MLATokenToKVPool": "replicated", "DeepSeekV4TokenToKVPool": "replicated"},
        then="The kinds of its host pools must be cut by 'tp' then.",
        new="The kinds of its host pools must be 'replicated': TP rank 0 alone writes them.",
    ),
    Fact(
        of="ranks", look=ranks_told, load=lambda: sources(CONTROLLER),
        uses="adapters/sglang/engine.py `_coordinate` takes apart",
        said={
            "tp_rank with DP attention": "parallel.attn_tp_rank",
            "tp_size with DP attention": "parallel.attn_tp_size",
            "dp_rank with DP attention": "parallel.attn_dp_rank",
            "tp_rank without DP attention": "parallel.tp_rank",
            "tp_size without DP attention": "parallel.tp_size",
            "dp_rank without DP attention": "0",
        },
        then="There TP ranks without DP attention are counted over the CP ranks.",
        new="See whether `_coordinate` still tells all ranks apart that hold different bytes.",
    ),
    Fact(
        of=f"{STORAGE}:HiCacheStorageConfig", label="writers", look=writes,
        uses="docs/sglang.md and adapters/sglang/identity.py rely on",
        said={"MHA on TP rank 0": "True", "MHA on TP rank 1": "True", "MLA on TP rank 0": "True",
              "MLA on TP rank 1": "False"},
        then="Pages of a rank that does not write are in the store only if another has the same.",
    ),
    Fact(
        of="decode context parallelism", look=dcp_backends, load=lambda: sources(CONTROLLER),
        said={"backends": "('file', 'mooncake')"}, uses="adapters/sglang/engine.py refuses",
        then="`look` may let it through then: shards for it are there (dcp_size of Coordinate).",
    ),
    Fact(
        of="sglang.srt.mem_cache.utils:get_storage_hash_str", look=page_hashes,
        said={
            "first": "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f",
            "second": "c57b445f90651b9a650e516ab2238c965b21af35608a31c303e6d9e407f2915c",
            "salt": "another", "adapter": "another",
        },
        uses="adapters/sglang/traffic.py names pages by",
        then="64 hexadecimal digits are needed. Other hashes of the same tokens: what is stored "
             "is never found again. The same for another salt or adapter: pages are mixed up.",
    ),
    # -- what engine.py and updates.py read
    bag("get_model", "model_path", "revision", "kv_cache_dtype", "quantization",
        "json_model_override_args", "quantization_param_path", "load_format",
        "download_dir"),
    bag("get_model", "modelopt_quant", "rl_quant_profile", label="what quantizes while loading"),
    bag("get_lora", "lora_paths"),
    bag("get_spec", "speculative_draft_model_path", "speculative_draft_model_revision",
        "speculative_draft_kv_cache_dtype"),
    bag("get_parallel", "cp_strategy"),
    bag("get_serving", "weight_version", uses="adapters/sglang/updates.py reads"),
    bag("get_server_args", "model_path", "random_seed"),
    *(
        Fact(of=of, look=function, said={"parameters": parameters}, uses=uses, then=then)
        for of, parameters, uses, then in (
            ("sglang.srt.distributed.utils:get_pp_indices",
             "(num_hidden_layers, pp_rank, pp_size)", "adapters/sglang/engine.py calls",
             "`_stages` asks it how the layers are cut; option 'stages' stands in."),
            ("sglang.srt.layers.dp_attention:is_dp_attention_enabled", "()",
             "adapters/sglang/engine.py calls", "`_coordinate` asks it how TP ranks are counted."),
            ("sglang.srt.configs.model_config:ModelConfig.get_total_num_kv_heads", "(self)",
             "adapters/sglang/engine.py calls", "`_head_groups` needs the KV heads of the model."),
            ("sglang.srt.managers.scheduler_components.weight_updater:"
             "SchedulerWeightUpdaterManager.record_weight_version_after_update",
             "(self, weight_version)", "adapters/sglang/updates.py wraps",
             "Find another place that sees every update of weights."),
            *(
                ("sglang.srt.model_executor.model_runner_components.weight_updater:"
                 f"WeightUpdater.{name}", parameters, "adapters/sglang/updates.py wraps",
                 "Find another place that sees an update begin: it may fail half-way.")
                for name, parameters in (
                    ("begin_weight_update", "(self)"),
                    ("update_weights_from_disk",
                     "(self, model_path, load_format, weight_name_filter=None, "
                     "recapture_cuda_graph=False)"),
                    ("update_weights_from_tensor", "(self, named_tensors, load_format=None)"),
                    ("update_weights_from_ipc", "(self, recv_req)"),
                    ("load_weights_from_distributed", "(self, named_tensors)"),
                )
            ),
        )
    ),
    Fact(
        of="sglang.srt.configs.model_config:ModelConfig.from_server_args", look=takes(1),
        said={"call": "takes 1"}, uses="adapters/sglang/engine.py calls",
        then="`_configuration` needs the layers and KV heads of the model.",
    ),
    Fact(
        of="sglang.srt.configs.model_config:ModelConfig", look=assigned("num_hidden_layers"),
        said={"num_hidden_layers": _THERE}, uses=_READS,
        then="`_stages` needs the number of layers.",
    ),
    Fact(
        of="SchedulerWeightUpdaterManager", look=updates_of_weights,
        load=lambda: sources("managers/scheduler_components/weight_updater.py"),
        uses="adapters/sglang/updates.py relies on record_weight_version_after_update in",
        said=dict.fromkeys(("update_weights_from_disk", "update_weights_from_distributed",
                            "update_weights_from_tensor", "update_weights_from_ipc"), "True"),
        then="updates.py does not see an update this way: L3 would serve pages of old weights.",
        new="It must end in record_weight_version_after_update, or updates.py must wrap it.",
    ),
    # -- host pools
    Fact(
        of="host pools", look=host_pool_classes,
        load=lambda: sources("mem_cache/memory_pool_host.py", "mem_cache/pool_host"),
        uses="adapters/sglang/pools.py _KINDS knows, or refuses,",
        said={
            "AsymmetricMHATokenToKVPoolHost": "MHATokenToKVPoolHost",
            "DSAIndexerPoolHost": "HostKVCache",
            "DeepSeekV4PagedHostPool": "HiSparseHostPoolMixin, HostKVCache",
            "DeepSeekV4StateHostPool": "HostKVCache",
            "HiSparseMHATokenToKVPoolHost": "HiSparseHostPoolMixin, MHATokenToKVPoolHost",
            "LogicalHostPool": "no base",
            "MHATokenToKOnlyPoolHost": "HostKVCache",
            "MHATokenToKVPoolHost": "HostKVCache",
            "MHATokenToKVPoolMXFP8Host": "MHATokenToKVPoolHost",
            "MLATokenToKVPoolHost": "HiSparseHostPoolMixin, HostKVCache",
            "MambaPoolHost": "HostKVCache",
            "MiniMaxM3Nvfp4IndexKPoolHost": "HostKVCache",
            "MiniMaxM3Nvfp4MainKVPoolHost": "MiniMaxM3Nvfp4IndexKPoolHost",
            "PageInterleaveHostPool": "no base",
            "QSAIndexerPoolHost": "DeepSeekV4PagedHostPool",
            "UnifiedPageEnvelopeHostPool": "HostKVCache",
        },
        then="_KINDS goes by the class's name.",
        new="It is refused until _KINDS knows it: what do its pages hold, and does TP cut them?",
    ),
    Fact(
        of="sglang.srt.mem_cache.device_pool_info:KVBufferLayout", look=members,
        said={"NHD": "'nhd'", "PAGED_NHD": "'paged_nhd'", "HND": "'hnd'",
              "VECTORIZED_5D": "'vectorized_5d'"},
        uses="adapters/sglang/identity.py _device_order names",
        then="Engines with another order of tokens on the device must have pages of their own.",
        new="Look whether each order of tokens on the device is still told apart.",
    ),
    pool("MHATokenToKVPoolHost", _host_pools("mha", "page_head"), *_MHA, more=_SPLIT),
    pool("AsymmetricMHATokenToKVPoolHost", _host_pools("mha", v_head_dim=6), *_MHA),
    pool("MLATokenToKVPoolHost", _host_pools("mla"), "dtype", "layer_num", "target_layer_num",
         "start_layer", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "logical_page_size"),
    pool("DSAIndexerPoolHost", _host_pools("indexer"), "layer_num", "target_layer_num",
         "start_layer", "indexer_page_stride_size"),
    pool("MambaPoolHost", _host_pools("mamba_states"), "num_mamba_layers", "mtp_draft_buffer_infos",
         "temporal_state_shape", "conv_state_shapes", "slot_state_device_tensors",
         "temporal_dtype", "conv_dtype"),
    pool("DeepSeekV4PagedHostPool", _host_pools("v4_pages"), "dtype", "layer_num", "start_layer",
         "size_per_token"),
    pool("DeepSeekV4StateHostPool", _host_pools("v4_states"), "dtype", "layer_num", "start_layer",
         "size_per_token"),
    pool("LogicalHostPool", _host_pools("logical")),
]  # fmt: skip
