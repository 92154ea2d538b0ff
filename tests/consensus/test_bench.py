"""bench/consensus: it runs, every figure is there, and wrong effects end it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from l3store.consensus.values import Config, Grant, Release, Settle, Storage, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

BENCH = Path(__file__).resolve().parents[2] / "bench" / "consensus"
CONFIG = Config(Topology(2, tp=2))
GROUPS = ("reports, window 8", "reports, window 1", "collective", "carried by the engine")


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the scripts, which are no package, for one test."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("traffic")
    sys.modules.pop("traffic", None)


class Facts:
    """Takes whatever is said."""

    def ready(self) -> None: ...


class Member:
    def __init__(self) -> None:
        self.facts = Facts()
        self.machine = type("Machine", (), {"tickets": {}})


def engine(traffic: ModuleType) -> Any:
    return traffic.Engine(Member(), traffic.Ledger(), CONFIG, 0)


def pages(traffic: ModuleType, ticket: int) -> tuple[int, int]:
    """What two ranks have of a ticket, and what they read of it."""
    granted = min(traffic.hit(ticket, rank) for rank in (0, 1))
    return granted, min(traffic.reached(ticket, rank, granted) for rank in (0, 1)) if granted else 0


def test_effects_that_are_right_pass(traffic: ModuleType) -> None:
    ours, ended = engine(traffic), 0
    ours.carry_out([Storage(True, 1)])
    for ticket in range(200):
        granted, least = pages(traffic, ticket)
        if granted:
            ours.carry_out([Grant(ticket, granted)])
            ours.carry_out([Settle(ticket, least, granted, "complete")])
            ours.carry_out([Release(ticket, granted - least)])
        else:
            ours.carry_out([Settle(ticket, 0, 0, "short")])
        ended += 1
    assert ours.proof()[1] == ended
    whole = [t for t in range(200) if pages(traffic, t)[0] == pages(traffic, t)[1] > 0]
    assert list(ours.settled) == whole


def test_effects_that_are_wrong_end_the_run(traffic: ModuleType) -> None:
    ticket = next(t for t in range(200) if pages(traffic, t)[1] > 1)
    granted, least = pages(traffic, ticket)
    for effects in (
        [Grant(ticket, granted - 1)],
        [Grant(ticket, granted), Settle(ticket, least - 1, granted, "complete")],
        [Settle(ticket, 0, 0, "short")],
        [Storage(False, 1)],
    ):
        with pytest.raises(SystemExit):
            engine(traffic).carry_out(effects)


def test_pages_that_stay_reserved_end_the_run(traffic: ModuleType) -> None:
    ledger = traffic.Ledger()
    ours = traffic.Engine(Member(), ledger, CONFIG, 0)
    ledger.take(0, 5)
    ledger.settle(0, 4)
    with pytest.raises(SystemExit, match="1 pages"):
        ours.proof()


def test_another_order_is_another_digest(traffic: ModuleType) -> None:
    first, second = next(
        (a, b) for a in range(99) for b in range(a) if all(pages(traffic, t)[0] for t in (a, b))
    )
    grants = [Grant(ticket, pages(traffic, ticket)[0]) for ticket in (first, second)]
    one, other = engine(traffic), engine(traffic)
    one.carry_out(grants)
    other.carry_out(grants[::-1])
    assert one.proof()[0] != other.proof()[0]


@pytest.mark.soak
def test_quick_run() -> None:
    run = subprocess.run(
        [sys.executable, BENCH, "--quick", "--json"], capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    seen = {figure["what"]: figure for figure in json.loads(run.stdout)["figures"]}
    for ranks in (2, 4):
        for tickets in (1, 64):
            label = f"{ranks} x {tickets:>2}  "
            for group in GROUPS:
                assert seen[f"{label}CPU: {group}"]["ours"] > 0
                assert f"{label}all read, to settled everywhere: {group}" in seen
                if group != "carried by the engine":
                    step = seen[f"{label}step: {group}"]
                    assert step["ratio"] == pytest.approx(step["ours"] / step["other"])
                records = seen.get(f"{label}records a step: {group}")
                assert records is None or records["ok"]
                reports = seen.get(f"{label}reports a rank and second: {group}")
                assert reports is None or reports["ok"]
            for what in (
                "gathers a request: collective",
                "messages a request: reports, window 8",
                "collectives a request: one all-reduce a step",
            ):
                # So few steps may be over before one of 64 tickets is.
                figure = seen.get(f"{label}{what}") if tickets == 64 else seen[f"{label}{what}"]
                assert figure is None or figure["ours"] > 0
