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
            loaded = SimpleNamespace(
                update_weights_from_disk=lambda *args, **kw: (success, f"{role} {success}")
            )
            runner = SimpleNamespace(weight_updater=loaded)
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


@pytest.mark.parametrize(("version", "unnamed"), [(None, True), ("step-2", False)])
def test_an_update(update, version, unnamed):
    assert update(target=True, draft=True, version=version)
    assert (updates.seen().count, updates.seen().unnamed) == (1, unnamed)


def test_an_update_of_the_target_whose_draft_failed(update):
    """sglang serves the new weights then, and records no version of theirs."""
    assert not update(target=True, draft=False, version="step-2")
    assert (updates.seen().count, updates.seen().unnamed) == (1, True)


def test_an_update_that_changed_nothing(update):
    assert not update(target=False, draft=True)
    assert (updates.seen().count, updates.seen().unnamed) == (0, False)


def test_watching_twice_counts_once(update):
    updates.watch()
    assert update(target=True, draft=True)
    assert updates.seen().count == 1
