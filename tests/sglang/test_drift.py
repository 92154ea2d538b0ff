"""What of sglang the adapter leans on is as it was; messages say what moved and what to change."""

from __future__ import annotations

import ast
import inspect
import sys
from abc import abstractmethod
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import pytest
import sglang
from drift import WRITTEN_FOR, moved
from engine_facts import FACTS
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

import l3store.adapters.sglang
from l3store.adapters.sglang.options import ENGINE_OPTIONS
from l3store.adapters.sglang.pools import _KINDS

ADAPTER = Path(l3store.adapters.sglang.__file__).parent


def fact(of):
    (found,) = [one for one in FACTS if (one.label or one.of).endswith(of)]
    return found


@pytest.mark.parametrize("one", FACTS, ids=lambda one: one.label or one.of.rpartition(":")[2])
def test_nothing_moved(one):
    if lines := moved(one):
        # Alone, as whoever tries another version reads a screen full of these.
        pytest.fail("\n".join(lines), pytrace=False)


class TestTheFactsAreAllThatIsUsed:
    """Or the adapter could lean on something that nobody compares."""

    @pytest.fixture(scope="class")
    def trees(self):
        return {path.name: ast.parse(path.read_text()) for path in sorted(ADAPTER.glob("*.py"))}

    def test_every_import_from_sglang(self, trees):
        known = {one.of.split("(")[0] for one in FACTS}
        modules = {
            of.split(":")[0] + ":" + of.split(":")[1].split(".")[0] for of in known if ":" in of
        }
        for file, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    assert not any(name.name.startswith("sglang") for name in node.names), file
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                    for name in node.names:
                        assert f"{node.module}:{name.name}" in modules, f"{file}: {name.name}"

    def test_everything_that_is_read_of_host_pools(self, trees):
        known = {name for one in FACTS if one.of.startswith("host pool") for name in one.said}
        known |= {"stores_page_envelope"}  # a class attribute of one of them, with a default here
        for file in ("pools.py", "identity.py"):
            read = {
                node.attr
                for node in ast.walk(trees[file])
                if isinstance(node, ast.Attribute)
                and ast.unparse(node.value) in ("pool", "self._pool")
            } | {
                node.args[1].value
                for node in ast.walk(trees[file])
                if isinstance(node, ast.Call)
                and ast.unparse(node.func) == "getattr"
                and ast.unparse(node.args[0]) == "pool"
            }
            assert len(read) > 3
            assert read <= known, file

    @pytest.mark.parametrize(
        ("holder", "of"),
        [
            ("config", ":HiCacheStorageConfig"),
            ("model", ":get_model()"),
            ("spec", ":get_spec()"),
            ("get_parallel()", ":get_parallel()"),
            ("args", ":get_server_args()"),
        ],
    )
    def test_everything_that_is_read_of_the_engine(self, trees, holder, of):
        read = {
            node.attr
            for node in ast.walk(trees["engine.py"])
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == holder
        }
        assert read
        assert read <= set(fact(of).said)

    def test_every_kind_of_pool(self):
        classes = fact("host pools").said
        assert set(_KINDS) <= set(classes)
        built = {one.of.removeprefix("host pool ") for one in FACTS if "host pool " in one.of}
        assert set(_KINDS) == built

    def test_options_that_are_the_engines(self):
        assert set(fact("extra_config").said) == ENGINE_OPTIONS


class TestTheAdapterFits:
    """sglang can call it as it calls its own."""

    @pytest.fixture
    def cls(self):
        # Here: where sglang moved, the facts say it better than an import that fails.
        try:
            from l3store.adapters.sglang import L3StoreHiCache
        except Exception as error:  # whatever a module of sglang raises
            pytest.fail(f"L3StoreHiCache cannot be imported: {error}", pytrace=False)
        return L3StoreHiCache

    def test_every_call_has_an_answer(self, cls):
        only_for_mooncake = {"describe_l3_object_layout"}
        for name in fact("storage_backend").said.keys() - only_for_mooncake:
            assert callable(getattr(cls, name, None)), name

    def test_the_same_parameters_by_name(self, cls):
        for name in fact(":HiCacheStorage").said:
            if not hasattr(HiCacheStorage, name):
                continue  # as `test_nothing_moved` says
            theirs, ours = (
                list(inspect.signature(getattr(one, name)).parameters)
                for one in (HiCacheStorage, cls)
            )
            assert ours == theirs, name

    def test_nothing_abstract_is_left(self, cls):
        assert not cls.__abstractmethods__


class OtherSignature(HiCacheStorage):
    def batch_get_v1(self, keys, host_indices, deadline, extra_info=None):
        """Has one parameter more."""


class NewAbstract(HiCacheStorage):
    @abstractmethod
    def batch_touch(self, keys):
        """Is new."""


class OnePolicyMore(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"
    LEADING_PAGES = "leading_pages"


class OnePolicyLess(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing"


@dataclass
class OneRankMore(HiCacheStorageConfig):
    ep_rank: int = 0


class WithoutStages:
    model_path = revision = quantization = json_model_override_args = None
    quantization_param_path = load_format = download_dir = None


BITES = {
    "another signature": (
        ":HiCacheStorage", OtherSignature,
        ["adapters/sglang/hicache.py overrides HiCacheStorage.batch_get_v1: "
         "(self, keys, host_indices, extra_info=None) in sglang 0.5.23, "
         "(self, keys, host_indices, deadline, extra_info=None) in sglang 9. "
         "Give L3StoreHiCache the same parameters."],
    ),
    "a new abstract method": (
        ":HiCacheStorage", NewAbstract,
        ["sglang 9 has a new HiCacheStorage.batch_touch: abstract (self, keys). "
         "L3StoreHiCache must have it if it is abstract or the controller calls it."],
    ),
    "an argument that is gone": (
        ":get_model()", WithoutStages,
        ["adapters/sglang/engine.py reads get_model().kv_cache_dtype, which sglang 9 does not "
         "have. Find where it stands now: whose bytes are exchangeable depends on it."],
    ),
    "a new rank": (
        ":HiCacheStorageConfig", OneRankMore,
        ["sglang 9 has a new HiCacheStorageConfig.ep_rank: 0. If ranks that differ in it hold "
         "different bytes, it belongs into `_coordinate` of engine.py, or must be refused."],
    ),
    "a new hit policy": (
        ":PoolHitPolicy", OnePolicyMore,
        ["sglang 9 has a new PoolHitPolicy.LEADING_PAGES: 'leading_pages'. batch_exists_v2 takes "
         "it for all_pages, which may promise pages that are of no use."],
    ),
    "hit policies that are gone, or say something else": (
        ":PoolHitPolicy", OnePolicyLess,
        ["adapters/sglang/hicache.py knows PoolHitPolicy.TRAILING_PAGES: 'trailing_pages' in "
         "sglang 0.5.23, 'trailing' in sglang 9. batch_exists_v2 and prefixes.py go by it.",
         "adapters/sglang/hicache.py knows PoolHitPolicy.BLOCK_GROUPS, which sglang 9 does not "
         "have. batch_exists_v2 and prefixes.py go by it."],
    ),
    "a host pool that tells no addresses": (
        "host pool LogicalHostPool",
        type("Pool", (), {"layout": 1, "page_size": 1, "size": 1,
                          "get_data_page": lambda self, index: 0})(),
        ["adapters/sglang/pools.py or identity.py uses host pool LogicalHostPool."
         "get_page_buffer_meta, which sglang 9 does not have.",
         "host pool LogicalHostPool.get_data_page: (index, flat=True) in sglang 0.5.23, (index) "
         "in sglang 9.",
         "get_dummy_flat_data_page, which", "set_from_flat_data_page, which"],
    ),
    "a constant": (
        ":STORAGE_BATCH_SIZE", 256,
        ["say the most pages of a call: STORAGE_BATCH_SIZE.value: 128 in sglang 0.5.23, 256 in "
         "sglang 9."],
    ),
}  # fmt: skip


@pytest.mark.skipif(
    sglang.__version__ != WRITTEN_FOR, reason=f"doctors what sglang {WRITTEN_FOR} is made of"
)
class TestItBites:
    """The same comparison, of things that are not as they were."""

    @pytest.mark.parametrize("case", BITES)
    def test_and_says_what_to_change(self, case):
        of, doctored, expected = BITES[case]
        lines = set(moved(fact(of), doctored, version="9")) - set(moved(fact(of), version="9"))
        assert len(lines) == len(expected), lines
        for part in expected:
            assert any(part in line for line in lines), lines

    def test_a_thing_that_is_gone_altogether(self):
        gone = replace(fact(":get_pp_indices"), of="sglang.srt.distributed.utils:get_pp_cut")
        (line,) = moved(gone, version="9")
        assert line.startswith(
            "adapters/sglang/engine.py calls get_pp_cut, which sglang 9 has not so: "
        )
        assert "option 'stages' stands in" in line
        away = replace(gone, of="sglang.srt.nowhere:get_pp_indices")
        assert "No module named 'sglang.srt.nowhere'" in moved(away)[0]

    @pytest.mark.parametrize(
        ("of", "file", "old", "new", "says"),
        [
            (
                "storage_backend", "managers/cache_controller.py",
                "self.storage_backend.batch_exists(batch_hashes, extra_info)",
                "self.storage_backend.batch_find(batch_hashes, 3, near=True)",
                "has a new storage_backend.batch_find: 2, near. "
                "L3StoreHiCache must answer this call",
            ),
            (
                "storage_backend", "managers/cache_controller.py",
                "self.storage_backend.batch_set_v1(hash_values, host_indices, extra_info)",
                "self.storage_backend.batch_set_v1(hash_values, host_indices, None, extra_info)",
                "batch_set_v1: 3 in sglang 0.5.23, 4 in sglang 9. Look whether",
            ),
            (
                "extra_config", "managers/cache_controller.py",
                'storage_backend_extra_config.pop("tp_lcm_size", None)',
                'storage_backend_extra_config.pop("head_groups", None)',
                "has a new extra_config.head_groups: taken out. "
                "Add it to ENGINE_OPTIONS",
            ),
            (
                "replicated pools", "managers/cache_controller.py",
                "isinstance(self.mem_pool_device, MLATokenToKVPool)",
                "isinstance(self.mem_pool_device, LatentPool)",
                "replicated pools.MLATokenToKVPool, which sglang 9 does not",
            ),
            (
                "ranks", "managers/cache_controller.py",
                "tp_rank = parallel.tp_rank", "tp_rank = parallel.moe_tp_rank",
                "parallel.tp_rank in sglang 0.5.23, parallel.moe_tp_rank in sglang 9",
            ),
            (
                "SchedulerWeightUpdaterManager",
                "managers/scheduler_components/weight_updater.py",
                "def update_weights_from_ipc(", "def update_weights_from_peer(",
                "has a new SchedulerWeightUpdaterManager.update_weights_from_peer: True",
            ),
            (
                "SchedulerWeightUpdaterManager",
                "managers/scheduler_components/weight_updater.py",
                "self.record_weight_version_after_update(recv_req.weight_version)", "pass",
                "update_weights_from_disk: True in sglang 0.5.23, False in sglang 9. updates.py",
            ),
            (
                "host pools", "mem_cache/pool_host/mha.py",
                "class MHATokenToKOnlyPoolHost(", "class MHATokenToKTwicePoolHost(",
                "has a new host pools.MHATokenToKTwicePoolHost: HostKVCache. It is "
                "refused until _KINDS knows it",
            ),
        ],
        ids=lambda value: value.split("(")[0][-40:] if isinstance(value, str) else None,
    )  # fmt: skip
    def test_on_sources(self, of, file, old, new, says):
        one = fact(of)
        texts = one.thing()
        assert old in texts[file]
        doctored = texts | {file: texts[file].replace(old, new)}
        assert any(says in line for line in moved(one, doctored, version="9"))

    def test_on_the_factorys_call(self):
        class Factory:
            @staticmethod
            def create_backend(name, config, pool):
                sys.modules["drift_recorder"].Recorder(config, pool, extra={})

        (line,) = moved(fact(":StorageBackendFactory"), Factory, version="9")
        assert "L3StoreHiCache is made by StorageBackendFactory.constructor" in line
        assert "the configuration, {} in sglang 0.5.23, the configuration, None, extra={}" in line

    def test_on_who_writes(self):
        class Controller:
            @staticmethod
            def should_backup(self, transfer):
                return transfer.name in ("mamba", "draft")

        (line,) = {*moved(fact("writer"), Controller)} - {*moved(fact("writer"))}
        assert "draft: TP rank 0 in sglang 0.5.23, every rank" in line

    def test_what_is_new_and_does_not_matter_is_not_told(self):
        class More:
            model_path = revision = quantization = json_model_override_args = 1
            quantization_param_path = kv_cache_dtype = load_format = download_dir = 1
            something_else = 1

        assert moved(fact(":get_model()"), More) == []
