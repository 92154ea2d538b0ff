"""`sgl.Engine` over stores of ours: what it says must not depend on where its KV came from.

Each engine is a process of its own with the real scheduler, one process a rank, that serves a tiny
model on the CPU (support/serving.py). Each case asks a prompt of its own.
"""

from __future__ import annotations

import pytest
from serving import STORED, prompt

pytest_plugins = ["serving_fixtures"]

RANKS = {"TP1": {}, "TP2": {"tp": 2}, "PP2": {"pp": 2}}


def nvme(path, **options):
    options = {"capacity": "64MiB", **options}
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return {"url": f"nvme://{path}?{query}"}


@pytest.mark.parametrize("ranks", RANKS)
def test_answers_are_the_same_cold_after_a_flush_and_in_a_new_process(new_engine, tmp_path, ranks):
    store = nvme(tmp_path / "store")
    engine = new_engine(store, **RANKS[ranks])
    (cold,) = engine.ask(prompt(1))
    assert (cold.storage, cold.host, cold.device) == (0, 0, 0)
    engine.forget()
    (flushed,) = engine.ask(prompt(1))
    engine.kill()
    (anew,) = new_engine(store, **RANKS[ranks]).ask(prompt(1))
    for again in (flushed, anew):
        assert again.said == cold.said
        assert (again.storage, again.host, again.device) == (STORED, 0, 0)
