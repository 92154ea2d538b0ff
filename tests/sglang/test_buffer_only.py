"""`--hicache-host-memory-mode buffer_only`: host memory holds what is on its way to or from L3.

sglang keeps no L2 then: what L1 lost comes from storage.
"""

from __future__ import annotations

import pytest
from serving import STORED, prompt

pytest_plugins = ["serving_fixtures"]

RANKS = [pytest.param({}, id="TP1"), pytest.param({"pp": 2}, id="PP2", marks=pytest.mark.soak)]
OTHERS = range(801, 809)
"""More prompts than L1 has room for, and no more than an L2 would have."""


@pytest.mark.parametrize("ranks", RANKS)
def test_answers_are_the_same_from_storage_as_computed(new_engine, tmp_path, ranks):
    store = {"url": f"nvme://{tmp_path / 'store'}?capacity=64MiB"}
    mode = {"hicache_host_memory_mode": "buffer_only", **ranks}
    engine = new_engine(store, **mode)
    (cold,) = engine.ask(prompt(800))
    assert cold.cached == (0, 0, 0)
    for other in OTHERS:
        engine.ask(prompt(other))
    (evicted,) = engine.ask(prompt(800))
    engine.forget()
    (flushed,) = engine.ask(prompt(800))
    engine.kill()
    (anew,) = new_engine(store, **mode).ask(prompt(800))
    for again in (evicted, flushed, anew):
        assert again.said == cold.said
        assert again.cached == (STORED, 0, 0)
