"""`sgl.Engine` over stores of ours: what it says must not depend on where its KV came from.

Each engine is a process of its own with the real scheduler, one process a rank, that serves a tiny
model on the CPU (support/serving.py). What it says are tokens and the first one's logprob, bit for
bit. Each case asks a prompt of its own.
"""

from __future__ import annotations

import pytest
from damage import HARMS, pages_in
from serving import PAGE_SIZE, STORED, prompt

pytest_plugins = ["serving_fixtures"]

RANKS = {"TP1": {}, "TP2": {"tp": 2}, "PP2": {"pp": 2}}
URLS = {"nvme": "nvme://{}?capacity=64MiB", "file": "file://{}"}


def url_of(scheme, path):
    return URLS[scheme].format(path)


def nvme(path):
    return {"url": url_of("nvme", path)}


@pytest.mark.parametrize("ranks", RANKS)
def test_answers_are_the_same_cold_after_a_flush_and_in_a_new_process(new_engine, tmp_path, ranks):
    store = nvme(tmp_path / "store")
    engine = new_engine(store, **RANKS[ranks])
    (cold,) = engine.ask(prompt(1))
    assert cold.cached == (0, 0, 0)
    engine.forget()
    (flushed,) = engine.ask(prompt(1))
    engine.kill()
    (anew,) = new_engine(store, **RANKS[ranks]).ask(prompt(1))
    for again in (flushed, anew):
        assert again.said == cold.said
        assert again.cached == (STORED, 0, 0)


# -- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(engines):
    """An engine that runs for the whole file; each test attaches a store of its own."""
    one = engines.engine().start(engines.model(), None, served_model_name="tiny")
    yield one
    one.kill()


@pytest.fixture
def attached(engine):
    """Attaches a store to the engine, and detaches it after the test."""
    used = []

    def attach(extra, *more):
        if used:
            engine.detach()
        used.append(engine.attach(extra, *more))
        return engine

    yield attach
    if used:
        engine.detach()


# What is done to payloads is the same to whoever stores them.
CASES = [
    pytest.param(
        scheme, harm, marks=pytest.mark.soak if scheme == "file" and "payload" in harm else ()
    )
    for scheme in URLS
    for harm in HARMS
]


@pytest.mark.parametrize(("scheme", "harm"), CASES)
def test_damage_is_a_miss_from_there_on_and_heals(attached, tmp_path, scheme, harm):
    url, number = url_of(scheme, tmp_path / "store"), 100 + list(HARMS).index(harm)
    engine = attached({"url": url})
    (cold,) = engine.ask(prompt(number))
    engine.forget()
    HARMS[harm].do(pages_in(url, tmp_path / "store"))
    (damaged,) = engine.ask(prompt(number))
    assert damaged.said == cold.said
    assert damaged.storage == HARMS[harm].first * PAGE_SIZE
    engine.forget()
    (healed,) = engine.ask(prompt(number))
    assert healed.said == cold.said
    assert healed.storage == STORED


def test_without_checks_zeroed_pages_are_another_answer(attached, tmp_path):
    """What the cases above would be worth with a model that does not depend on its KV: nothing."""
    engine = attached({"file_storage_path": str(tmp_path)}, "file")
    (cold,) = engine.ask(prompt(200))
    engine.forget()
    files = list(tmp_path.iterdir())
    assert len(files) == STORED // PAGE_SIZE
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    (damaged,) = engine.ask(prompt(200))
    assert damaged.storage == STORED
    assert damaged.tokens != cold.tokens


# -- others in the same store ---------------------------------------------------------------------

OTHERS = {
    "dtype": {"dtype": "float16"},
    "page size": {"page_size": 32},
    "layout": {"hicache_mem_layout": "page_head"},
    "weights": {"seed": 1},
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_engine_in_the_same_store_is_never_answered_from_it(
    attached, new_engine, tmp_path, other
):
    engine = attached(nvme(tmp_path / "store"))
    (ours,) = engine.ask(prompt(300))
    engine.forget()

    different = new_engine(nvme(tmp_path / "empty"), served_model_name="tiny", **OTHERS[other])
    (alone,) = different.ask(prompt(300))
    different.detach()
    different.attach(nvme(tmp_path / "store"))
    (beside,) = different.ask(prompt(300))
    assert beside.said == alone.said
    assert beside.storage == 0

    (again,) = engine.ask(prompt(300))
    assert again.said == ours.said
    assert again.storage == STORED


@pytest.mark.parametrize("option", ["tag", "weights_revision"])
def test_pages_of_another_tag_or_revision_are_not_ours(attached, tmp_path, option):
    store = nvme(tmp_path / "store")
    engine = attached({**store, option: "first"})
    (first,) = engine.ask(prompt(310))
    attached({**store, option: "second"})
    (second,) = engine.ask(prompt(310))
    assert second.said == first.said
    assert second.storage == 0
    attached({**store, option: "first"})
    (again,) = engine.ask(prompt(310))
    assert again.said == first.said
    assert again.storage == STORED


def test_what_one_engine_stores_another_reads_while_both_run(attached, new_engine, tmp_path):
    store = nvme(tmp_path / "store")
    one = attached(store)
    other = new_engine(store, served_model_name="tiny")
    (first,) = one.ask(prompt(320))
    one.forget()
    (second,) = other.ask(prompt(320))
    assert second.said == first.said
    assert second.storage == STORED
    (third,) = other.ask(prompt(321))
    other.forget()
    (fourth,) = one.ask(prompt(321))
    assert fourth.said == third.said
    assert fourth.storage == STORED
