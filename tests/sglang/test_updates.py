"""Updates of weights in sglang's own updater: the adapter sees each that changed them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from l3store.adapters.sglang import updates

ARGUMENTS = {
    "update_weights_from_disk": ("m", "auto"),
    "load_weights_from_distributed": ([],),
    "update_weights_from_tensor": ([],),
    "update_weights_from_ipc": (None,),
}
WRITE_NOTHING = {
    "init_weights_update_group",
    "destroy_weights_update_group",
    "receive_weights_from_distributed",  # into memory of its own
    "end_weight_update",  # of what another began
}
WRITERS = [
    name
    for name, method in vars(WeightUpdater).items()
    if callable(method) and not name.startswith("_") and name not in WRITE_NOTHING
]


@pytest.fixture
def update(monkeypatch):
    """Updates a target and a draft from disk, each with success or not."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
    monkeypatch.setattr(updates, "_count", 0)
    monkeypatch.setattr(updates, "_unnamed", False)
    updates.watch()

    def run(*, target, draft, version=None):
        def worker(role, success):
            # As each method of a runner's updater is once it is watched.
            load = updates._begun(lambda *args, **kw: (success, f"{role} {success}"))
            runner = SimpleNamespace(weight_updater=SimpleNamespace(update_weights_from_disk=load))
            return SimpleNamespace(weight_update_runners=lambda: [(role, runner)])

        updater = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
        parts = {
            "metrics_collector": None,
            "tp_worker": worker("target", target),
            "draft_worker": worker("draft", draft),
            "flush_cache": lambda empty_cache: True,
            "scheduler": SimpleNamespace(record_weight_version_change=lambda new_version: None),
        }
        for name, part in parts.items():
            setattr(updater, name, part)
        request = SimpleNamespace(
            model_path="m", load_format=None, recapture_cuda_graph=False, flush_cache=True,
            torch_empty_cache=False, weight_version=version,
        )  # fmt: skip
        return updater.update_weights_from_disk(request).success

    return run


@pytest.mark.parametrize(
    ("version", "unnamed"), [(None, True), ("default", True), ("step-2", False)]
)
def test_an_update(update, version, unnamed):
    before = updates.seen()
    assert update(target=True, draft=True, version=version)
    assert updates.seen() != before
    assert updates.seen().unnamed is unnamed


@pytest.mark.parametrize(("target", "draft"), [(True, False), (False, True)])
def test_an_update_that_failed(update, target, draft):
    """What it wrote before that is served, and no version of it is recorded."""
    before = updates.seen()
    assert not update(target=target, draft=draft, version="step-2")
    assert updates.seen() != before
    assert updates.seen().unnamed


def test_watching_twice_counts_once(update):
    update(target=True, draft=True)
    once = updates.seen().count
    updates.watch()
    update(target=True, draft=True)
    assert updates.seen().count == 2 * once


@pytest.mark.parametrize("name", WRITERS)
def test_each_way_to_write_weights_is_seen_though_it_fails(update, name):
    """All that sglang's updater of a runner has, but what is known to write nothing."""

    def gone():
        raise LookupError("the model is gone")

    fields = [field.name for field in dataclasses.fields(WeightUpdater) if field.init]
    updater = WeightUpdater(**dict.fromkeys(fields) | {"device": "cpu", "get_model": gone})
    before = updates.seen()
    with pytest.raises(LookupError, match="the model is gone"):
        getattr(updater, name)(*ARGUMENTS.get(name, ()))
    assert updates.seen().count == before.count + 1
    assert updates.seen().unnamed
