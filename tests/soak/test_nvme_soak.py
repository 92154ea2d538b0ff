"""The long runs of the nvme backend: kills, power cuts, and processes that race."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from l3store import page, registry
from l3store.testing.kit import second_process
from l3store.testing.stateful import check_against_model
from tests.backends.nvme._crash import Batch, Siege, opened_nursery
from tests.backends.nvme.test_power_cut import RUNS, Run
from tests.conformance.test_nvme import TestNvme as _Suite

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

_RECYCLE = """
from tests.backends.nvme._crash import Batch
batch, number = Batch(32, 65536), 1
while True:
    assert all(store.page_set(batch.keys(number), batch.sealed(number)))
    say(number)
    sys.stdin.readline()
    number += 1
"""

_CHURN = """
import random
from tests.backends.nvme._crash import Batch
rng, wrong, batch = random.Random(int(sys.stdin.readline())), 0, Batch(8, 16384)
until = time.monotonic() + 60
while time.monotonic() < until:
    number, what = rng.randrange(40), rng.randrange(4)
    keys = batch.keys(number)
    if what == 0:
        store.page_set(keys, batch.sealed(number))
    elif what == 1:
        store.delete(keys[rng.randrange(8):])
    else:
        wrong += len(batch.wrong(number, store.page_get(keys, batch.room)))
say(wrong)
"""


@pytest.mark.parametrize("options", ["&io=direct&evict=lru", "&io=page&evict=sweep"])
def test_500_kills_take_nothing_that_was_acknowledged(tmp_path, options):
    with opened_nursery() as nursery:
        siege = Siege(nursery, tmp_path, seed=11, options=options)
        for _ in range(500):
            siege.round()
            assert siege.faults == []
        siege.end()
    assert siege.faults == []
    assert siege.counts["kills"] == 500
    if "direct" in options:  # who copies to the page cache is running, in the kernel or not
        assert siege.counts["inside"] >= 150


@pytest.mark.parametrize("run", RUNS)
def test_500_power_cuts_a_run(tmp_path, run):
    for part in range(5):
        folder = tmp_path / str(part)
        folder.mkdir()
        recorded = Run(folder, RUNS[run])
        for seed in range(part * 100, part * 100 + 100):
            recorded.cut(folder / str(seed), seed)


@pytest.mark.parametrize("checked", [True, False])
def test_a_reader_of_pages_that_are_recycled_takes_no_foreign_one(tmp_path, checked):
    """The oldest pages of a store are read while their slots are filled anew, for a minute."""
    url = f"nvme://{tmp_path}/store?capacity=16MiB&segment=4MiB&deadline=60s"
    rng, batch, good = random.Random(5), Batch(32, 65536), 0
    with registry.open(url, raw=True) as store, second_process(url, _RECYCLE) as writer:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            number = int(writer.stdout.readline())
            print(file=writer.stdin, flush=True)  # the next batch begins now
            for oldest in rng.choices(range(max(1, number - 8), number + 1), k=3):
                keys = batch.keys(oldest)
                done = store.page_get(keys, batch.room, page.opener(keys) if checked else None)
                assert not batch.wrong(oldest, done)
                good += sum(done)
        writer.kill()
        counts = dict(store._reader.counts)
    assert good > 0
    assert counts["recycled"] > 0
    assert counts["damaged"] == 0


def test_processes_that_set_delete_and_read_at_once_never_read_wrong_bytes(tmp_path):
    url = f"nvme://{tmp_path}/store?capacity=4MiB&segment=512KiB&writers=4&deadline=60s"
    others = [second_process(url, _CHURN) for _ in range(4)]
    for seed, process in enumerate(others):
        print(seed, file=process.stdin, flush=True)
    assert [process.communicate()[0] for process in others] == ["0\n"] * 4
    with registry.open(url, raw=True) as store:
        assert store.check_integrity() == []


def test_a_thousand_sequences_agree_with_a_dict(tmp_path):
    numbers = itertools.count()
    check_against_model(
        _Suite(), lambda: f"nvme://{tmp_path}/{next(numbers)}?capacity=64MiB", examples=1000
    )
