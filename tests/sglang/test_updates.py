"""Updates of weights in sglang's own updater: the adapter sees each that changed them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from l3store.adapters.sglang import updates


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
