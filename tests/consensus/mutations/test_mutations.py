"""Each rule of the protocol, taken out, is found by the simulation: or the rule is not tested."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from l3store.testing.simulation.broken import BROKEN
from l3store.testing.simulation.search import search

SEEDS = 2000
HISTORIES = set(range(1, 17))


@pytest.fixture(scope="module")
def searches():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield {name: pool.submit(search, range(SEEDS), [name], stop=True) for name in BROKEN}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_found(searches, name, record_property):
    tally = searches[name].result()
    assert tally.failed, f"{BROKEN[name].rule}: not found in {SEEDS} seeds"
    seed, violation = tally.failed[0]
    record_property("seeds", tally.runs)
    print(f"{name}: {tally.runs} seeds; seed {seed}: {violation}")


def test_every_history_has_a_fault():
    assert {fault.history for fault in BROKEN.values()} - {0} == HISTORIES


def test_faults_have_names_and_rules_of_their_own():
    assert len({fault.rule for fault in BROKEN.values()}) == len(BROKEN)
    assert all(name == fault.policy.name for name, fault in BROKEN.items())
