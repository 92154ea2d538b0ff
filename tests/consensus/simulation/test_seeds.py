"""Whole groups under every fault, by the thousand: nothing that must hold may break once."""

from __future__ import annotations

import os
import time

import pytest

from l3store.testing.simulation.plan import plan_of
from l3store.testing.simulation.policies import POLICIES
from l3store.testing.simulation.search import Tally, describe, search, shrink

PROTOCOLS = ("reports", "collective")
SOAK_SECONDS = float(os.environ.get("L3STORE_SOAK_SECONDS", "3600"))


def told(tally):
    """What to print: the counts, and the first violation made short."""
    lines = tally.lines()
    for seed, _ in tally.failed[:1]:
        policy = POLICIES[PROTOCOLS[seed % len(PROTOCOLS)]]
        lines.append(describe(shrink(plan_of(seed), policy), policy))
    return "\n".join(lines)


@pytest.mark.timeout(600)
def test_three_thousand_groups(thousands, capsys):
    tally = Tally()
    for part in thousands:
        tally.join(part.tally)
    with capsys.disabled():
        print("\n" + told(tally))
    assert tally.failed == []
    assert tally.never_met() == []
    assert tally.runs == 3000
    assert len(tally.interleavings) > 2500


def test_processes_find_what_one_finds():
    alone, shared = (search(range(60), PROTOCOLS, workers=workers) for workers in (1, 2))
    assert alone == shared


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_an_hour_of_other_groups(capsys):
    tally, first = Tally(), 1_000_000
    began = time.monotonic()
    while time.monotonic() - began < SOAK_SECONDS and not tally.failed:
        tally.join(search(range(first, first + 2000), PROTOCOLS, workers=2))
        first += 2000
    with capsys.disabled():
        print("\n" + told(tally))
    assert tally.failed == []
    assert tally.never_met() == []
