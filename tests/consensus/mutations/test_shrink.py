"""What a failing seed prints: short, of the same kind, and with the command that replays it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import Counter

import pytest

from l3store.consensus.local import Network
from l3store.testing.simulation import __main__ as command
from l3store.testing.simulation.broken import BROKEN
from l3store.testing.simulation.plan import FAULTS, plan_of, smaller
from l3store.testing.simulation.search import (
    NETWORK_FAULTS,
    Tally,
    alike,
    describe,
    search,
    shrink,
)
from l3store.testing.simulation.world import run

HISTORY = re.compile(r" *\d+\.\d{4}  (rank \d|VIOLATION)")


def size(plan):
    pages = sum(len(request.pages) for request in plan.requests)
    return len(plan.faults), len(plan.requests), pages, plan.network != Network()


@pytest.fixture(scope="module", params=["counts batches", "leaks on abort", "one bound"])
def failing(request):
    policy = BROKEN[request.param].policy
    seed, _ = search(range(200), [policy.name], stop=True).failed[0]
    return run(plan_of(seed), policy), shrink(plan_of(seed), policy), policy


def test_a_shrunk_plan_fails_alike_and_is_smaller(failing):
    found, shrunk, _ = failing
    assert alike(shrunk) == alike(found) != ""
    assert all(a <= b for a, b in zip(size(shrunk.plan), size(found.plan), strict=True))
    assert size(shrunk.plan) != size(found.plan)


def test_nothing_more_can_be_left_out(failing):
    _, shrunk, policy = failing
    assert not [each for each in smaller(shrunk.plan) if alike(run(each, policy)) == alike(shrunk)]


def test_what_is_printed_is_short_and_can_be_run_again(failing):
    _, shrunk, policy = failing
    text = describe(shrunk, policy)
    history = [line for line in text.splitlines() if HISTORY.match(line)]
    assert 1 <= len(history) <= 30
    assert any(line.endswith(f"VIOLATION {shrunk.violations[0]}") for line in history)
    again = text.splitlines()[-1].removeprefix("again: ")
    words = shlex.split(again)
    assert words[0] == "python"
    said = subprocess.run(
        [sys.executable, *words[1:]], capture_output=True, text=True, timeout=100, check=False
    )
    assert (said.returncode, said.stderr) == (1, "")
    assert said.stdout.endswith(f"{text}\n")


def test_a_request_that_is_left_out_takes_its_own_faults_along():
    plan = next(
        plan
        for plan in map(plan_of, range(300))
        if any(fault.kind == "aborted" and fault.number == 1 for fault in plan.faults)
        and len(plan.requests) > 2
    )
    names = {plan.requests[fault.number].name for fault in plan.faults if fault.kind == "aborted"}
    for each in smaller(plan):
        aborts = [fault for fault in each.faults if fault.kind == "aborted"]
        left = {request.name for request in each.requests}
        assert {each.requests[fault.number].name for fault in aborts} <= names & left


def test_a_kind_of_fault_that_was_never_met_fails_a_search(monkeypatch, capsys):
    assert set(Tally().never_met()) == {*FAULTS, *NETWORK_FAULTS}
    words = ["simulation", "--seeds", "0:2", "--policy", "reports", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", words)
    assert command.main() == 1
    assert "never met: " in capsys.readouterr().out


def test_groups_that_vote_need_not_lose_reports():
    tally = Tally(met=Counter((*FAULTS, "record delayed")))
    assert tally.never_met(reports=False) == []
    assert set(tally.never_met()) == {k for k in NETWORK_FAULTS if k.startswith("report ")}
