"""Hybrid models through sglang's own controller: mamba, a sliding window and DSA, byte for byte."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
import torch
from hicache_rank import l3store, make_model, tokens
from hybrid_rank import Indexed, Mamba, Window

from l3store import registry
from l3store.adapters.sglang import pools
from l3store.page import parse

KINDS = [Mamba, Window, Indexed]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def url(tmp_path):
    return f"nvme://{tmp_path}/store?capacity=64MiB"


@pytest.fixture
def ranks(model, url):
    """Makes ranks on the store; they end with the test."""
    made = []

    def make(kind, **options):
        made.append(kind(model, l3store(url, **options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def backed_up(rank):
    """Inserts 5 pages, then 8 that go on from them, and backs them up.

    Returns:
        The prompt, its KV by layer, and the sidecar at the end of the prompt.
    """
    page = rank.geometry.page_size
    prompt = tokens(8, page_size=page)
    rank.insert(prompt[: 5 * page], seed=1)
    kv = rank.insert(prompt, seed=2)
    rank.backup()
    return prompt, kv, rank.inserted


def longer(rank, prompt):
    """A request that starts with the prompt: the last page of one is never looked for."""
    return prompt + tokens(1, page_size=rank.geometry.page_size, seed=9)


def same(found, expected):
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "copied"])
@pytest.mark.parametrize("kind", KINDS)
def test_kv_and_sidecar_come_back_into_a_new_rank(ranks, kind, v1):
    first = ranks(kind, v1=v1)
    prompt, kv, sidecar = backed_up(first)
    first.close()
    rank = ranks(kind, v1=v1)
    rank.wipe()
    assert rank.prefetch(longer(rank, prompt)) == len(prompt)
    found_kv, found_sidecar = rank.load_back_all(prompt)
    assert all(same(found_kv.values(), kv.values()))
    assert all(same(found_sidecar, sidecar))
    assert not any(outcome == "refused" for _, outcome in rank.backend.outcomes())


def lose(url, pool, *depths):
    """Removes pages of a pool from the store; `depths` count pages of KV."""
    with closing(registry.open(url, raw=True)) as store:
        by_depth = {}
        for key, header in zip(keys := list(store.scan()), store.headers(keys), strict=True):
            if "/kv/" in key:
                by_depth[parse(header).depth] = key.rpartition("/")[2]
        wanted = {by_depth[depth] for depth in depths}
        lost = [key for key in keys if f"/{pool}/" in key and key.rpartition("/")[2] in wanted]
        assert store.delete(lost) == [True] * len(depths)


@pytest.mark.parametrize(
    ("kind", "lost", "usable"),
    [
        (Mamba, [7], 5),  # the state at the end: the one before it is at page 5
        (Mamba, [4], 8),  # another state than the one that is needed
        (Mamba, [4, 7], 0),
        (Window, [7], 7),  # pages 5 to 7 are a whole window
        (Window, [6], 6),
        (Window, [0, 1], 8),  # outside of the window
        (Indexed, [5], 5),
        (Indexed, [0], 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_lost_page_of_the_sidecar_shortens_the_prefix(ranks, url, kind, lost, usable):
    rank = ranks(kind)
    prompt, kv, _ = backed_up(rank)
    rank.wipe()
    lose(url, rank.name, *lost)
    page = rank.geometry.page_size
    assert rank.prefetch(longer(rank, prompt)) == usable * page
    found, _ = rank.load_back_all(prompt) if usable else (rank.held(prompt), None)
    expected = [layer[: usable * page] for layer in kv.values()]
    assert all(same(found.values(), expected))


def test_a_lost_page_of_kv_limits_a_sidecar_that_is_whole(ranks, url):
    rank = ranks(Indexed)
    prompt, _, _ = backed_up(rank)
    rank.wipe()
    lose(url, "kv", 3)
    assert rank.prefetch(longer(rank, prompt)) == 3 * rank.geometry.page_size


def test_an_attach_that_a_sidecar_failed_is_undone_by_a_detach(ranks):
    """sglang has its threads running by then, and takes no other attach before."""
    rank = ranks(Mamba)
    extra = json.dumps({**rank.extra, "prefetch_threshold": 1})

    def attach():
        return rank.cache.attach_storage_backend("dynamic", extra, "tiny/model")

    assert rank.cache.detach_storage_backend()[0]
    known = pools._KINDS.pop("MambaPoolHost")
    try:
        done, said = attach()
    finally:
        pools._KINDS["MambaPoolHost"] = known
    assert not done
    assert "pool 'mamba' is a MambaPoolHost" in said
    assert not attach()[0]
    assert rank.cache.detach_storage_backend()[0]
    assert attach()[0]
    prompt, _, _ = backed_up(rank)
    rank.wipe()
    assert rank.prefetch(longer(rank, prompt)) == len(prompt)
