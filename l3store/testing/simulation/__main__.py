"""``python -m l3store.testing.simulation``: searches seeds for a violation, or replays one."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time

from l3store.consensus.reports import Reports
from l3store.errors import nearest
from l3store.testing.simulation.plan import plan_of
from l3store.testing.simulation.policies import POLICIES
from l3store.testing.simulation.search import describe, search, shrink


def main() -> int:
    """Returns 1 if a violation was found, or a kind of fault was never met."""
    parser = argparse.ArgumentParser(
        prog="python -m l3store.testing.simulation",
        description="Runs whole groups in virtual time, under every fault: one run a seed. Ends "
        "with 1 if a run did what must never happen, or no run met a kind of fault.",
    )
    parser.add_argument(
        "--seeds",
        type=_seeds,
        default="0:3000",
        metavar="FIRST:LAST",
        help="from FIRST to before LAST, or one seed to replay (%(default)s)",
    )
    parser.add_argument(
        "--policy",
        type=_policy,
        action="append",
        metavar="NAME",
        help="code of the ranks: reports, collective, or a deliberate fault, by its name in "
        "l3store.testing.simulation.broken; of several, seeds take turns (reports, collective)",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="go on with further seeds for so long"
    )
    given = parser.parse_args()
    policies = given.policy or ["reports", "collective"]
    seeds = given.seeds
    began = time.monotonic()
    tally = search(seeds, policies, workers=given.workers)
    while not tally.failed and time.monotonic() - began < given.seconds:
        seeds = range(seeds.stop, seeds.stop + 1000)
        tally.join(search(seeds, policies, workers=given.workers))
    print("\n".join(tally.lines()))
    for seed, _ in tally.failed[:1]:
        policy = POLICIES[policies[seed % len(policies)]]
        print(describe(shrink(plan_of(seed), policy), policy))
    reports = any(issubclass(POLICIES[name].agreement, Reports) for name in policies)
    never = tally.never_met(reports=reports) if len(seeds) > 1 else []
    if never:
        print(f"never met: {', '.join(never)}")
    return 1 if tally.failed or never else 0


def _seeds(text: str) -> range:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    first, last = found.groups() if found else ("0", "0")
    seeds = range(int(first), int(last or int(first) + 1))
    if not seeds:
        raise argparse.ArgumentTypeError(
            f"{text!r} names no seeds: it is FIRST:LAST, FIRST below LAST, or one number"
        )
    return seeds


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise argparse.ArgumentTypeError(f"unknown policy {name!r}{nearest(name, POLICIES)}")
    return name


if __name__ == "__main__":
    sys.exit(main())
