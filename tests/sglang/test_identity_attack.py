"""Engines that are equal in all that their arguments say, and compute other KV."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager,
    _WeightUpdateSession,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from l3store.adapters.sglang import engine, options, updates
from l3store.adapters.sglang.weights import fingerprint
from l3store.errors import ConfigError


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(updates, "_count", 0)
    monkeypatch.setattr(updates, "_unnamed", False)
    monkeypatch.setattr(engine, "_attached_at", {})
    updates.watch()
    yield
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))


@pytest.fixture
def revision(model):
    """Returns the weights revision of an engine with these arguments, and options of ours."""

    def of(given=None, *, resolved=None, **args):
        started = ServerArgs(model_path=str(model), device="cpu", **args)
        if resolved:
            declare_resolution(started, "test", **resolved)
        set_global_server_args_for_scheduler(started)
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
            model_name="served",
        )  # fmt: skip
        return engine.look(config, options.load({"url": "memory://", **(given or {})}))

    return lambda *args, **kwargs: of(*args, **kwargs).weights_revision


class TestAdapters:
    """SGLang's page hashes know an adapter of --lora-paths by its name and path alone."""

    @pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
    def test_a_retrained_adapter_under_the_same_path(self, revision, tmp_path, file):
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        (adapter / "adapter_model.safetensors").write_bytes(bytes(4096))
        (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
        named = LoRARef(
            lora_id=LoRARef.deterministic_id("a", str(adapter)), lora_name="a",
            lora_path=str(adapter),
        )  # fmt: skip
        loaded = {"lora_paths": [named]}
        before = revision(resolved=loaded)
        assert revision(resolved=loaded) == before != revision()
        held = (adapter / file).read_bytes()
        (adapter / file).write_bytes(held[:-1] + b" ")
        assert revision(resolved=loaded) != before


class TestWeights:
    def test_random_weights_are_not_those_of_the_files(self, revision):
        assert revision(load_format="dummy") != revision()

    def test_weights_of_another_engine_are_not_those_of_the_files(self, revision):
        """It may have been updated since it started."""
        instance = {
            "load_format": "remote_instance",
            "remote_instance_weight_loader_backend": "nccl",
            "remote_instance_weight_loader_seed_instance_ip": "127.0.0.1",
            "remote_instance_weight_loader_seed_instance_service_port": 1,
            "remote_instance_weight_loader_send_weights_group_ports": [2],
        }
        with pytest.raises(ConfigError, match=r"remote_instance.* tell option 'weights_revision'"):
            revision(**instance)
        assert revision({"weights_revision": "step-7"}, **instance) == "step-7"

    def test_files_are_looked_for_where_sglang_downloads_to(self, revision, tmp_path):
        """The cache of the hub may hold another snapshot under the same name."""
        weights = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
        weights.mkdir(parents=True)
        (weights / "model.safetensors").write_bytes(b"downloaded")
        refs = weights.parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text("a" * 40)
        revision(download_dir=str(tmp_path))
        assert engine._folder("org/name", None) == weights
        revision()
        assert engine._folder("org/name", None) is None

    def test_other_scales_of_fp8_kv_make_other_bytes(self, revision, tmp_path):
        found = [revision()]
        for scales in ("1.0", "2.0"):
            (tmp_path / "scales.json").write_text(scales)
            found.append(revision(quantization_param_path=str(tmp_path / "scales.json")))
        assert len(set(found)) == 3

    def test_quantizing_while_loading_makes_other_weights(self, revision):
        seen = {
            revision(),
            revision(modelopt_quant="fp8"),
            revision(modelopt_quant="nvfp4"),
            revision(rl_quant_profile="/models/profile.pt"),
        }
        assert len(seen) == 4

    def test_mistrals_own_configuration_counts(self, tmp_path):
        (tmp_path / "consolidated.safetensors").write_bytes(bytes(4096))
        (tmp_path / "params.json").write_text('{"rope_theta": 1e6}')
        before = fingerprint(tmp_path)
        (tmp_path / "params.json").write_text('{"rope_theta": 1e8}')
        assert fingerprint(tmp_path) != before

    @pytest.mark.parametrize(
        "args", [{"json_model_override_args": '{"rope_theta": 1}'}, {"weight_version": "step-7"}]
    )
    def test_what_the_operator_says_names_the_files_alone(self, revision, args):
        told = {"weights_revision": "r1"}
        assert revision(told, **args) != revision(told)

    def test_a_revision_does_not_outlive_an_update_without_a_name(self, revision):
        told = {"weights_revision": "r1"}
        revision(told)
        updates._begun(lambda: None)()
        with pytest.raises(ConfigError, match="'r1', as before the weights were updated"):
            revision(told)
        assert revision({"weights_revision": "r2"}) == "r2"
        assert revision({"weights_revision": "r2"}) == "r2"  # an attach that failed otherwise


class _Model(torch.nn.Module):
    def __init__(self, good):
        super().__init__()
        self._good = good

    def load_weights(self, weights):
        if not self._good:
            raise RuntimeError("half of them")


@pytest.fixture
def manager():
    """Returns sglang's own weight updater over runners, each a role and whether its loads succeed.

    Its runners' updaters are sglang's, too; no process group is there to receive anything.
    """

    def make(*runners):
        made = []
        for role, good in runners:
            one = object.__new__(WeightUpdater)
            model = _Model(good)
            object.__setattr__(one, "get_model", lambda model=model: model)
            object.__setattr__(one, "device", "cpu")
            made.append((role, SimpleNamespace(weight_updater=one)))
        found = object.__new__(SchedulerWeightUpdaterManager)
        found._session = _WeightUpdateSession(selector="all")
        found.metrics_collector = None
        found.tp_worker = SimpleNamespace(
            model_runner=made[0][1], weight_update_runners=lambda: made
        )
        found.draft_worker = None
        return found

    return make


@pytest.fixture
def request_of_no_weights(monkeypatch):
    received = lambda self, **kwargs: []  # noqa: E731
    monkeypatch.setattr(WeightUpdater, "receive_weights_from_distributed", received)
    return SimpleNamespace(
        names=[], dtypes=[], shapes=[], group_name="g", load_format=None, selector="all",
        weight_version="v2", flush_cache=False, torch_empty_cache=False,
    )  # fmt: skip


def test_a_load_that_failed_half_way_is_an_update(manager, request_of_no_weights):
    """The target has its new weights, the draft has not: sglang records and flushes nothing."""
    before = updates.seen()
    updater = manager(("target", True), ("draft", False))
    assert not updater.update_weights_from_distributed(request_of_no_weights).success
    after = updates.seen()
    assert (after != before, after.unnamed) == (True, True)


def test_weights_that_somebody_else_writes_are_an_update(manager):
    """P2P: a session is begun, and nothing is loaded before its end."""
    before = updates.seen()
    WeightUpdater.begin_weight_update(
        manager(("target", True)).tp_worker.model_runner.weight_updater
    )
    assert updates.seen() != before


def test_stages_that_contradict_the_engine_are_refused(model):
    """Its middle stage has as many layers, and they are others."""
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=1, pp_size=3, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="served",
    )  # fmt: skip
    cut = engine.look(config, options.load({"url": "memory://"})).stages
    assert engine.look(config, options.load({"url": "memory://", "stages": cut})).stages == cut
    other = [*cut[1:], cut[0]] if cut[0] != cut[-1] else [cut[0] + 1, cut[1], cut[2] - 1]
    with pytest.raises(ConfigError, match="but the engine's stages are"):
        engine.look(config, options.load({"url": "memory://", "stages": other}))
