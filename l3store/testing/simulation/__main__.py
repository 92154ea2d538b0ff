"""``python -m l3store.testing.simulation``: searches seeds for a violation, or replays one."""

from __future__ import annotations

import argparse
import os
import sys
import time

from l3store.consensus.reports import Reports
from l3store.testing.simulation.plan import plan_of
from l3store.testing.simulation.policies import POLICIES
from l3store.testing.simulation.search import describe, search, shrink


def main() -> int:
    """Returns 1 if a violation was found, or a kind of fault was never met."""
    parser = argparse.ArgumentParser(prog="python -m l3store.testing.simulation")
    parser.add_argument("--seeds", default="0:3000", help="FIRST:LAST, or one seed to replay")
    parser.add_argument(
        "--policy",
        action="append",
        choices=sorted(POLICIES),
        help="of the ranks; may be given often",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=0.0, help="go on from there for so long")
    given = parser.parse_args()
    policies = given.policy or ["reports", "collective"]
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
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


if __name__ == "__main__":
    sys.exit(main())
