"""sglang's query, read, write and main thread in one adapter at once, which is closed under them.

Rounds are counted, not timed: the main thread takes a step when each other thread took one.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from threading import Event, Thread

import host_pools
import pytest
from attached import attach, hashes, indices
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from l3store.adapters.sglang.pools import bytes_of

PROMPTS, LENGTH = 4, 6
CHAINS = [hashes(LENGTH, prompt=str(prompt)) for prompt in range(PROMPTS)]
TARGET = range(PROMPTS * LENGTH, (PROMPTS + 1) * LENGTH)
"""Host pages that are read into; those before are what is stored, and stay as they are."""
STEPS, OPENINGS, AFTERWARDS = 60, 8, 3
URLS = {
    "nvme": ("nvme://{}?capacity=64MiB", {}),
    "nvme, staged": ("nvme://{}?capacity=64MiB", {"late": "staged"}),
    "file": ("file://{}", {}),
}


class Caller(Thread):
    """Calls the adapter until some rounds after it was closed; `good` pages of each call count."""

    def __init__(self, call, closed):
        super().__init__(daemon=True)
        self.call, self.closed = call, closed
        self.rounds, self.good, self.good_after_close = 0, 0, 0
        self.error = None

    def run(self):
        try:
            after = 0
            while after < AFTERWARDS:
                closed = self.closed.is_set()
                good = self.call(self.rounds)
                self.good += good
                if closed:
                    after, self.good_after_close = after + 1, self.good_after_close + good
                self.rounds += 1
        except BaseException as error:
            self.error = error


def wait_for(what):
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.001)


def page(pool, number):
    return bytes(bytes_of(pool.get_data_page(number * pool.page_size)))


class Calls:
    """What sglang's threads ask of a model with states of mamba beside its KV."""

    def __init__(self, rank, pools):
        self.rank, self.pools = rank, pools
        self.kept = {
            name: [page(pool, number) for number in range(TARGET.start)]
            for name, pool in pools.items()
        }
        self.wrong = []

    def transfers(self, prompt, numbers):
        return [
            PoolTransfer(
                name=PoolName(name), keys=CHAINS[prompt], host_indices=indices(pool, numbers)
            )
            for name, pool in self.pools.items()
        ]

    def query(self, number):
        chain = CHAINS[number % PROMPTS]
        states = PoolTransfer(name=PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = self.rank.batch_exists_v2(chain, [states])
        return found.kv_hit_pages + self.rank.batch_exists(chain)

    def read(self, number):
        prompt = number % PROMPTS
        for pool in self.pools.values():
            for target in TARGET:
                blank = pool.get_dummy_flat_data_page()
                pool.set_from_flat_data_page(target * pool.page_size, blank.zero_())
        if number % 2:
            got = self.rank.batch_get_v2(self.transfers(prompt, TARGET))
        else:
            at = indices(self.pools["kv"], TARGET)
            got = {"kv": self.rank.batch_get_v1(CHAINS[prompt], at)}
        for name, good in got.items():
            for i, target in enumerate(TARGET):
                kept = self.kept[name][prompt * LENGTH + i]
                if good[i] and page(self.pools[name], target) != kept:
                    self.wrong.append((name, prompt, i))
        return sum(map(sum, got.values()))

    def write(self, number):
        prompt = number % PROMPTS
        numbers = range(prompt * LENGTH, (prompt + 1) * LENGTH)
        if number % 2:
            return sum(map(sum, self.rank.batch_set_v2(self.transfers(prompt, numbers)).values()))
        return sum(self.rank.batch_set_v1(CHAINS[prompt], indices(self.pools["kv"], numbers)))


@pytest.fixture
def pools():
    made = {
        "kv": host_pools.mha(pages=TARGET.stop),
        "mamba": host_pools.mamba_states(slots=TARGET.stop),
    }
    for seed, pool in enumerate(made.values()):
        pool.allocator.fill(seed)
    return made


@pytest.fixture(params=URLS)
def new_adapter(request, model, tmp_path, pools):
    """Attaches the adapter to one store, as an engine does that starts again."""
    url, options = URLS[request.param]
    return lambda: attach(
        url.format(tmp_path / "store"), model, pools["kv"], {"mamba": pools["mamba"]},
        ranks={"enable_storage_metrics": True}, **options,
    )  # fmt: skip


@contextmanager
def called(rank, pools):
    """The three threads call; at the end the adapter is closed under them. Yields them."""
    calls, closed = Calls(rank, pools), Event()
    callers = [Caller(call, closed) for call in (calls.query, calls.read, calls.write)]
    for caller in callers:
        caller.start()
    try:
        yield callers
    finally:
        rank.close()
        closed.set()
        for caller in callers:
            caller.join(60)
    assert [(caller.error, caller.is_alive()) for caller in callers] == [(None, False)] * 3
    assert calls.wrong == []
    assert [caller.good_after_close for caller in callers] == [0] * 3


def wait_for_good_pages(callers):
    wait_for(lambda: all(caller.error or caller.good for caller in callers))


def wait_for_a_round(callers):
    ends = [(caller, caller.rounds + 1) for caller in callers]
    wait_for(lambda: all(caller.error or caller.rounds >= end for caller, end in ends))


def test_cleared_and_asked_for_its_figures_meanwhile(new_adapter, pools):
    rank = new_adapter()
    told, removed = {"prefetch_pgs": 0, "backup_pgs": 0}, 0

    def add_stats():
        stats = rank.get_stats()
        for name in told:
            told[name] += sum(getattr(stats, name))

    with called(rank, pools) as callers:
        wait_for_good_pages(callers)
        for step in range(STEPS):
            wait_for_a_round(callers)
            add_stats()
            if step % 3 == 0:
                removed += rank.clear().removed
    add_stats()
    _, reader, writer = callers
    assert told == {"prefetch_pgs": reader.good, "backup_pgs": writer.good}
    assert removed > 0


def test_closed_again_and_again_while_it_is_called(new_adapter, pools):
    for _ in range(OPENINGS):
        with called(new_adapter(), pools) as callers:
            wait_for_good_pages(callers)
