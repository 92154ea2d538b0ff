"""What takes long: every layout and policy, and hours of an engine's life in minutes."""

from __future__ import annotations

import random
import time

import pytest
from damage import HARMS, pages_in
from serving import STORED, nursery, prompt

pytest_plugins = ["serving_fixtures"]
pytestmark = pytest.mark.soak

PROMPTS = range(500, 530)
SECONDS = 120
ROUNDS = 40


@pytest.mark.parametrize("interface_v1", [1, 0])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_every_layout_by_either_interface(new_engine, tmp_path, layout, interface_v1):
    url = f"nvme://{tmp_path / 'store'}?capacity=64MiB"
    args = {"hicache_mem_layout": layout}
    if layout == "page_first_direct":
        args["hicache_io_backend"] = "direct"
    extra = {"url": url, "interface_v1": interface_v1}
    engine = new_engine(extra, **args)
    (cold,) = engine.ask(prompt(700))
    engine.forget()
    (flushed,) = engine.ask(prompt(700))
    assert flushed.said == cold.said
    assert flushed.storage == STORED
    engine.forget()
    HARMS["all payloads zeroed"].do(pages_in(url, tmp_path / "store"))
    (damaged,) = engine.ask(prompt(700))
    assert damaged.said == cold.said
    assert damaged.storage == 0
    engine.forget()
    engine.kill()
    (anew,) = new_engine(extra, **args).ask(prompt(700))
    assert anew.said == cold.said
    assert anew.storage == STORED


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_every_prefetch_policy(new_engine, tmp_path, policy):
    engine = new_engine(
        {"url": f"nvme://{tmp_path / 'store'}?capacity=64MiB"},
        hicache_storage_prefetch_policy=policy,
    )
    numbers = list(PROMPTS)[:6]
    right = [answer.said for answer in engine.ask(*map(prompt, numbers))]
    for _ in range(10):
        engine.forget()
        answers = engine.ask(*map(prompt, numbers))
        assert [answer.said for answer in answers] == right
    if policy != "best_effort":  # which takes what is there by its turn, often nothing
        assert sum(answer.storage for answer in answers) > STORED


@pytest.mark.parametrize("ranks", [{}, {"tp": 2}, {"pp": 2}], ids=["TP1", "TP2", "PP2"])
def test_an_engine_that_is_killed_flushed_and_fed_damaged_pages(new_engine, tmp_path, ranks):
    """On a store that is too small for all of it, so that it evicts all the time."""
    store = {"url": f"nvme://{tmp_path / 'store'}?capacity=4MiB&segment=256KiB"}
    reference = new_engine(None, **ranks)
    right = {}
    for number in PROMPTS:
        (answer,) = reference.ask(prompt(number))
        right[number] = answer.said
    reference.kill()
    rng, hits = random.Random(7), 0
    engine = new_engine(store, **ranks)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        numbers = rng.sample(PROMPTS, rng.randint(1, 5))
        answers = engine.ask(*map(prompt, numbers))
        for number, answer in zip(numbers, answers, strict=True):
            assert answer.said == right[number], (number, answer)
        hits += sum(answer.storage for answer in answers)
        if rng.random() < 0.5:
            engine.forget()
            if rng.random() < 0.3:
                _spoil(rng, tmp_path / "store")
        elif rng.random() < 0.15:
            engine.kill()
            engine = new_engine(store, **ranks)
    assert hits > 20 * STORED


INJECTED = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",  # seconds, at most
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2",
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",  # ends ranks that decide otherwise
}
"""sglang's own faults: before each call of a backend it waits, or answers for it that it failed."""


@pytest.fixture
def troubled(monkeypatch):
    """Engines whose ranks have these faults, each at calls of its own."""
    for name, value in INJECTED.items():
        monkeypatch.setenv(name, value)
    with nursery() as engines:
        yield engines


def test_two_ranks_whose_calls_are_late_or_fail_apart_answer_as_without_l3(troubled, tmp_path):
    url = f"nvme://{tmp_path / 'store'}?capacity=64MiB"
    reference = troubled.engine().start(troubled.model(), None, tp=2)
    asked = PROMPTS[:8]
    right = {number: reference.ask(prompt(number))[0].said for number in asked}
    reference.kill()
    rng, hits = random.Random(8), 0
    engine = troubled.engine().start(troubled.model(), {"url": url}, tp=2)
    for _ in range(ROUNDS):
        numbers = rng.sample(asked, rng.randint(1, 4))
        answers = engine.ask(*map(prompt, numbers))
        assert [answer.said for answer in answers] == [right[number] for number in numbers]
        hits += sum(answer.storage for answer in answers)
        if rng.random() < 0.7:
            engine.forget()
    assert engine.said().count("random_delay_limit=0.05s, failure_prob=0.2") == 2
    assert hits > 10 * STORED


def _spoil(rng, store):
    """Writes 8 KiB of anything somewhere into a segment."""
    segments = [file for file in store.iterdir() if file.name.startswith("seg-")]
    with rng.choice(segments).open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(rng.randrange(max(1, size - 8192)))
        file.write(rng.randbytes(8192))
