"""Each rule of the protocol, taken out, is found by the simulation: or the rule is not tested."""

from __future__ import annotations

import pytest

from l3store.testing.simulation.broken import BROKEN

pytestmark = pytest.mark.timeout(600)  # a search gives way to whatever else the machine does
HISTORIES = set(range(1, 17))
CHECKS = (
    "after its last report",
    "are lost or twice there",
    "tickets ended otherwise",
    "occupancy",
    "L3 is off, and tickets",
    "has long been unusable",
    "host pages are free after",
    "the machine's state",
    "the tree's state",
    "ahead of the slowest rank",
    "was not ready",
    "ranks mean other pages",
    "before every rank had answered",
    "; all have",
    "and a rank has only",
    "which is no end point",
    "were to come",
    "no rank has said less than enough",
    "inputs differed, and no rank was told",
    "stopped without a reason",
    "is pinned, and nothing is going on",
    "and every rank had its pages",
    "L3 was switched",
    "hangs: requests wait",
    "pages are kept",
    "is free under a call",
    "began while L3 was off",
    "was settled, and host page",
    "was settled under a call",
    "and has not ended on this rank",
    "was consumed as good, and failed",
    "above the limit",
    "is overdue in step",
    "not worth a download",
    "under another policy",
    "timed out too soon",
    "reports still tell of tickets",
    "reports still tell that",
    "waits, and is wanted now",
    "the store was given",
    "the device was given",
    "was aborted before it came",
)
"""What the simulation says of a fault, for each thing that it looks at."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_found(searches, name, record_property):
    tally = searches[name].tally
    assert tally.failed, f"{BROKEN[name].rule}: not found in {tally.runs} seeds"
    seed, violation = tally.failed[0]
    record_property("seeds", tally.runs)
    print(f"{name}: {tally.runs} seeds; seed {seed}: {violation}")


@pytest.mark.parametrize("words", CHECKS)
def test_every_check_of_the_simulation_finds_a_fault(searches, words):
    found = [searches[name].tally.failed[0][1] for name in BROKEN]
    assert any(words in violation for violation in found)


def test_every_history_has_a_fault():
    assert {fault.history for fault in BROKEN.values()} - {0} == HISTORIES


def test_faults_have_names_and_rules_of_their_own():
    assert len({fault.rule for fault in BROKEN.values()}) == len(BROKEN)
    assert all(name == fault.policy.name for name, fault in BROKEN.items())
