"""Runs many seeds, counts what was met, and makes a failing one short."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, repeat
from multiprocessing import get_context
from typing import TYPE_CHECKING

from l3store.testing.simulation.plan import FAULTS, plan_of, smaller
from l3store.testing.simulation.policies import POLICIES
from l3store.testing.simulation.world import run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from l3store.testing.simulation.plan import Plan
    from l3store.testing.simulation.world import Outcome, Policy

__all__ = ["NETWORK_FAULTS", "Tally", "alike", "describe", "search", "shrink"]

NETWORK_FAULTS = (
    "record delayed",
    "report delayed",
    "report doubled",
    "report in a step",
    "report lost",
    "report overtaken",
    "report read ahead",
)
"""What `LocalGroup` and `World` count beside the kinds of `FAULTS`."""
SHRINK_RUNS = 300
"""Runs that making one plan smaller may cost."""
_PART = 25
_ALIKE = 40


@dataclass(slots=True)
class Tally:
    """What a number of runs came to."""

    runs: int = 0
    records: int = 0
    switches: int = 0
    met: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    interleavings: set[int] = field(default_factory=set)
    failed: list[tuple[int, str]] = field(default_factory=list)
    """Seeds with a violation, and the first of its violations."""

    @property
    def tickets(self) -> int:
        """Settled by all runs together."""
        return self.reasons.total()

    def add(self, outcome: Outcome) -> None:
        """Counts a run."""
        self.runs += 1
        self.records += outcome.records
        self.switches += outcome.switches
        self.met += outcome.met
        self.reasons.update(reason for _, _, reason in outcome.settled)
        self.interleavings.add(outcome.interleaving)
        if outcome.violations:
            self.failed.append((outcome.plan.seed, outcome.violations[0]))

    def join(self, other: Tally) -> None:
        """Counts the runs of another tally."""
        self.runs += other.runs
        self.records += other.records
        self.switches += other.switches
        self.met += other.met
        self.reasons += other.reasons
        self.interleavings |= other.interleavings
        self.failed += other.failed

    def never_met(self, *, reports: bool = True) -> list[str]:
        """Returns the kinds of faults that no run has met: with one of them a search has failed.

        Args:
            reports: Some of the runs had reports, which can be lost.
        """
        return [
            kind
            for kind in (*FAULTS, *NETWORK_FAULTS)
            if not self.met[kind] and (reports or not kind.startswith("report "))
        ]

    def lines(self) -> list[str]:
        """Returns what a search prints."""
        return [
            f"{self.runs} runs, {len(self.interleavings)} distinct interleavings, {self.records} "
            f"records, {self.tickets} tickets, {self.switches} switches of L3",
            "settled: " + ", ".join(f"{n} {kind}" for kind, n in self.reasons.most_common()),
            *(f"{self.met[kind]:>8} {kind}" for kind in (*FAULTS, *NETWORK_FAULTS)),
            f"{len(self.failed)} violations",
        ]


def search(
    seeds: Iterable[int], policies: Sequence[str], *, workers: int = 1, stop: bool = False
) -> Tally:
    """Runs every seed under one of the policies in turn.

    Args:
        seeds: Each is a plan, and with the number of its policy all that a run depends on.
        policies: Names of `POLICIES`; the one that runs is number ``seed % len(policies)``.
        workers: Processes.
        stop: End at the first violation.
    """
    tally = Tally()
    parts = list(_parts(list(seeds)))
    if workers == 1:
        for part in parts:
            tally.join(_run_part(part, policies, stop))
            if stop and tally.failed:
                break
        return tally
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for each in pool.map(_run_part, parts, repeat(policies), repeat(stop)):
            tally.join(each)
            if stop and tally.failed:
                pool.shutdown(cancel_futures=True)
                break
    return tally


def _parts(seeds: list[int]) -> Iterable[list[int]]:
    return (seeds[at : at + _PART] for at in range(0, len(seeds), _PART))


def _run_part(seeds: list[int], policies: Sequence[str], stop: bool) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.add(run(plan_of(seed), POLICIES[policies[seed % len(policies)]]))
        if stop and tally.failed:
            break
    return tally


def alike(outcome: Outcome) -> str:
    """Returns its first violation without numbers, in short: what two runs may have in common."""
    text = outcome.violations[0] if outcome.violations else ""
    return re.sub(r"[0-9.]+", "#", text)[:_ALIKE]


def shrink(plan: Plan, policy: Policy) -> Outcome:
    """Returns the run of the smallest plan that was found and still has a violation alike."""
    best = run(plan, policy)
    kind, runs = alike(best), 0
    found = bool(best.violations)
    while found and runs < SHRINK_RUNS:
        found = False
        for candidate in smaller(best.plan):
            runs += 1
            outcome = run(candidate, policy)
            if outcome.violations and alike(outcome) == kind:
                best, found = outcome, True
                break
            if runs == SHRINK_RUNS:
                break
    return best


def describe(outcome: Outcome, policy: Policy, *, again: bool = True) -> str:
    """Returns what is left of a failing run: its plan, its last steps, and how to run it again.

    Args:
        outcome: How it went.
        policy: Whose code it ran.
        again: Its plan is that of its seed, so that a command can run it again.
    """
    plan = outcome.plan
    config = plan.config
    said = outcome.violations[0] if outcome.violations else outcome.refused or "no violation"
    return "\n".join(
        chain(
            [
                f"seed {plan.seed} under {policy.name}: {said}",
                f"pp {config.topology.pp}, cp {config.topology.cp}, tp {config.topology.tp}; "
                f"policy {config.policy}, window {config.window}, {plan.capacity} host pages",
            ],
            (f"  {request}" for request in plan.requests),
            (f"  {fault}" for fault in plan.faults),
            outcome.history,
            [
                f"again: python -m l3store.testing.simulation --seeds {plan.seed} "
                f"--policy {shlex.quote(policy.name)}"
            ]
            * again,
        )
    )
