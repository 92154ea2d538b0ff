"""Whose pages are exchangeable: what the adapter reads from the engine, and the names it makes."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from l3store.adapters.sglang import options
from l3store.adapters.sglang.engine import Engine, look
from l3store.adapters.sglang.identity import BYTE_ORDER, groups_of, identify
from l3store.adapters.sglang.pools import Kind
from l3store.errors import ConfigError
from l3store.keys import Coordinate
from l3store.testing import topology

OPTIONS = options.load({"url": "memory://"})
MHA = Kind("mha", "tp", paired=True, rows=True)
MLA = Kind("mla", "replicated", rows=True)
ENGINE = Engine(
    model="m", at=Coordinate(), kv_cache_dtype="auto", draft_kv_cache_dtype="auto",
    quantization=None, stages=None, weights_revision="w", draft_revision=None, context_order="",
    rocm=False, replicated=False, head_groups=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's folder with a configuration and a weight file: 7 layers, 4 KV heads."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 7,
        "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "vocab_size": 128,
        "intermediate_size": 64, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return folder


@pytest.fixture
def seen(model):
    """Returns what `look` says of an engine started with these arguments, as this rank."""

    def look_at(given=OPTIONS, args=None, **ranks):
        set_global_server_args_for_scheduler(
            ServerArgs(**{"model_path": str(model), "device": "cpu", **(args or {})})
        )
        config = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
            "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
            "is_page_first_layout": True, "model_name": "served",
        }  # fmt: skip
        return look(HiCacheStorageConfig(**config | ranks), given)

    return look_at


def pool(**changes):
    """A host pool's geometry as `identify` reads it."""
    mha = {
        "layout": "page_first", "dtype": torch.bfloat16, "layer_num": 4, "target_layer_num": 4,
        "head_num": 2, "head_dim": 16, "v_head_dim": 16, "start_layer": 0,
        "kv_lora_rank": 32, "qk_rope_head_dim": 16, "kv_cache_dim": 48,
    }  # fmt: skip
    return SimpleNamespace(**mha | changes)


class Pages:
    """Where pages lie, of a size."""

    def __init__(self, page_tokens):
        self.page_tokens = page_tokens

    def segment_bytes(self, part=0):
        return (1024, 1024)


def named(
    engine=ENGINE, given=OPTIONS, name="kv", kind=MHA, page_size=16, page_tokens=16, **changes
):
    built = pool(**changes)
    identity = identify(engine, given, name, built, kind, Pages(page_tokens), page_size)
    return identity.descriptor.namespace(), identity.shards


DIFFERENT = {
    "model": {"engine": replace(ENGINE, model="other")},
    "weights": {"engine": replace(ENGINE, weights_revision="other")},
    "quantization": {"engine": replace(ENGINE, quantization="awq")},
    "the cut of stages": {"engine": replace(ENGINE, stages=(3, 1))},
    "the order of context parallelism": {"engine": replace(ENGINE, context_order="zigzag")},
    "tag": {"given": options.load({"url": "memory://", "tag": "blue"})},
    "pool": {"name": "swa"},
    "class": {"kind": MLA},
    "dtype": {"dtype": torch.float16},
    "layout": {"layout": "layer_first"},
    "layers": {"layer_num": 3, "target_layer_num": 3},
    "heads": {"head_num": 1},
    "head size": {"head_dim": 8},
    "V's head size": {"v_head_dim": 8},
    "page size": {"page_size": 32},
    "tokens of a host page": {"page_tokens": 8},
    "draft layers": {"target_layer_num": 3, "engine": replace(ENGINE, draft_revision="d")},
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_pages_that_differ_have_another_namespace(what):
    assert named(**DIFFERENT[what])[0] != named()[0]


def test_layouts_with_one_order_of_bytes_share_their_pages():
    assert named(layout="layer_first")[0] == named(layout="page_first_direct")[0]


def test_byte_orders_are_those_of_the_topology_suite():
    assert BYTE_ORDER == topology.BYTE_ORDER


def test_a_draft_belongs_to_the_namespace_of_its_own_pages_alone():
    with_draft = replace(ENGINE, draft_revision="d")
    assert named(with_draft)[0] == named()[0]
    assert named(with_draft, name="draft")[0] != named(name="draft")[0]


def test_pools_that_do_not_tell_of_draft_layers_are_kept_apart_by_the_draft():
    kind = Kind("deepseek_v4_pages", "replicated")
    raw = {"name": "swa", "kind": kind, "size_per_token": 64}
    with_draft = replace(ENGINE, draft_revision="d")
    assert named(with_draft, **raw)[0] != named(**raw)[0]


@pytest.mark.parametrize(
    ("kind", "at", "shard"),
    [
        (MHA, Coordinate(), "all"),
        (MHA, Coordinate(tp=1, tp_size=2), "T1of2"),
        (MLA, Coordinate(tp=1, tp_size=2), "all"),
        (MHA, Coordinate(pp=1, pp_size=2, tp=3, tp_size=4), "P1of2-T3of4"),
        (MLA, Coordinate(pp=1, pp_size=2, tp=3, tp_size=4), "P1of2"),
        (MLA, Coordinate(cp=1, cp_size=2, tp=3, tp_size=4), "C1of2"),
    ],
)
def test_a_shard_says_which_part_of_how_many(kind, at, shard):
    assert named(replace(ENGINE, at=at), kind=kind)[1] == [shard]


def test_head_groups_are_shared_between_tp_sizes():
    names = {}
    for tp_size in (1, 2, 4):
        for tp in range(tp_size):
            at = Coordinate(tp=tp, tp_size=tp_size)
            engine = replace(ENGINE, at=at, head_groups=4)
            heads = 4 // tp_size
            namespace, shards = named(engine, layout="page_head", head_num=heads)
            for head, shard in enumerate(shards, start=tp * heads):
                names.setdefault(head, set()).add((namespace, shard))
    assert {head: len(found) for head, found in names.items()} == dict.fromkeys(range(4), 1)
    assert len(set.union(*names.values())) == 4


def test_head_groups_need_the_layout_page_head():
    with pytest.raises(ConfigError, match="page_head, not 'page_first'"):
        groups_of(replace(ENGINE, head_groups=4), "kv", pool(), MHA)


@pytest.mark.parametrize(("name", "without"), [("draft", "the draft"), ("swa", "the pool")])
def test_a_pool_of_an_mla_model_that_sglang_backs_up_in_part_is_refused(name, without):
    engine = replace(ENGINE, at=Coordinate(tp_size=2), replicated=True)
    with pytest.raises(ConfigError, match=rf"{name!r}.*TP rank 0 alone.*without {without}"):
        named(engine, name=name)
    named(engine, name=name, kind=MLA)  # the same on all ranks: TP rank 0 is enough


class TestDtype:
    """uint8 is what pools of both fp8 kinds say."""

    def test_raw_bytes_without_a_logical_dtype_are_refused(self):
        with pytest.raises(ConfigError, match=r"'kv' says 'uint8'.*--kv-cache-dtype"):
            named(dtype=torch.uint8)

    def test_the_engine_or_the_option_tells_it(self):
        told = {
            named(replace(ENGINE, kv_cache_dtype=kind), dtype=torch.uint8)[0]
            for kind in ("fp8_e4m3", "fp8_e5m2")
        }
        assert len(told) == 2
        given = options.load({"url": "memory://", "dtype": "fp8_e4m3"})
        assert named(given=given, dtype=torch.uint8)[0] in told

    def test_a_draft_has_its_own(self):
        engine = replace(ENGINE, kv_cache_dtype="fp8_e4m3", draft_kv_cache_dtype="fp8_e5m2")
        both = replace(engine, draft_kv_cache_dtype="fp8_e4m3")
        raw = {"name": "draft", "dtype": torch.uint8}
        assert named(engine, **raw)[0] != named(both, **raw)[0]
        assert named(engine, dtype=torch.uint8) == named(both, dtype=torch.uint8)

    def test_rocm_means_other_bits_by_the_same_name(self):
        engine = replace(ENGINE, kv_cache_dtype="fp8_e4m3")
        assert (
            named(engine, dtype=torch.uint8)[0]
            != named(replace(engine, rocm=True), dtype=torch.uint8)[0]
        )

    def test_an_option_that_contradicts_the_pool_is_refused(self):
        given = options.load({"url": "memory://", "dtype": "fp8_e4m3"})
        with pytest.raises(ConfigError, match="says 'fp8_e4m3', but the pool is 'bfloat16'"):
            named(given=given)


class TestRanks:
    """Where a rank stands, from what SGLang tells."""

    def test_tp_ranks_that_are_counted_over_cp_ranks(self, seen):
        at = [
            seen(tp_rank=tp, tp_size=4, attn_cp_rank=tp // 2, attn_cp_size=2).at for tp in range(4)
        ]
        assert [(rank.cp, rank.tp, rank.tp_size) for rank in at] == [
            (0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2),
        ]  # fmt: skip

    def test_cp_of_an_mla_model_whose_parts_nobody_writes_is_refused(self, seen):
        with pytest.raises(ConfigError, match="TP rank 0 write alone"):
            seen(tp_size=2, attn_cp_size=2, is_mla_model=True)

    def test_decode_context_parallelism_is_refused(self, seen):
        with pytest.raises(ConfigError, match="decode context parallelism"):
            seen(tp_size=2, dcp_size=2, is_mla_model=True, logical_page_size=16)


class TestStages:
    """The cut of a pipeline's stages decides which layers a page holds."""

    def test_they_follow_from_the_model_as_in_the_engine(self, seen):
        assert seen().stages is None
        assert seen(pp_size=2).stages == (3, 4)
        assert seen(pp_size=3, pp_rank=2).stages == (2, 2, 3)

    def test_a_partition_of_the_operators(self, seen, monkeypatch):
        monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "5,2")
        assert seen(pp_size=2).stages == (5, 2)

    def test_the_option_stands_in_for_an_unreadable_model(self, seen):
        nowhere = {"model_path": "dummy"}  # which sglang itself does not look for
        with pytest.raises(ConfigError, match="tell option 'stages'"):
            seen(pp_size=2, args=nowhere)
        given = options.load({"url": "memory://", "stages": [4, 3]})
        assert seen(given, pp_size=2, args=nowhere).stages == (4, 3)

    def test_an_option_for_another_number_of_stages(self, seen):
        given = options.load({"url": "memory://", "stages": [4, 3]})
        with pytest.raises(ConfigError, match="names 2 stages, not 3"):
            seen(given, pp_size=3)

    def test_one_stage_needs_no_naming(self, seen):
        with pytest.raises(ConfigError, match=r"'stages'.*one stage"):
            seen(options.load({"url": "memory://", "stages": [9]}))


class TestHeadGroups:
    def test_at_most_one_a_head(self, seen):
        assert seen(tp_lcm_size=4, tp_size=2).head_groups == 4
        with pytest.raises(ConfigError, match="the model has 4 KV heads"):
            seen(tp_lcm_size=8, tp_size=8)
        with pytest.raises(ConfigError, match="positive, not -2"):
            seen(tp_lcm_size=-2, tp_size=2)

    def test_mla_has_none(self, seen):
        assert seen(tp_lcm_size=8, is_mla_model=True).head_groups == 0


class TestName:
    def test_where_a_model_lies_does_not_matter(self, seen):
        assert seen(model_name="/data/models/tiny").model == "tiny"
        assert seen(model_name="/mnt/tiny").model == "tiny"
        assert seen(model_name="./models/tiny").model == "tiny"
        assert seen(model_name=".data/tiny").model == "tiny"
        assert seen(model_name="Qwen/Qwen3-8B").model == "Qwen/Qwen3-8B"


class TestWeights:
    def test_other_weights_under_the_same_path(self, seen, model):
        before = seen().weights_revision
        held = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(held[:-1] + b"x")
        assert seen().weights_revision != before
        (model / "model.safetensors").write_bytes(held)
        assert seen().weights_revision == before

    def test_an_override_of_the_model_is_another_model(self, seen):
        args = {"json_model_override_args": '{"rope_theta": 1}'}
        assert seen(args=args).weights_revision != seen().weights_revision

    def test_the_version_of_the_running_weights_counts(self, seen):
        before = seen().weights_revision
        assert seen(args={"weight_version": "step-7"}).weights_revision != before
        assert seen().weights_revision == before

    def test_without_files_the_path_has_to_do(self, seen):
        assert seen(args={"model_path": "dummy"}).weights_revision == "path dummy revision None"


@pytest.fixture(autouse=True)
def _arguments_left_as_they_were():
    yield
    assert get_context() is not None
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
