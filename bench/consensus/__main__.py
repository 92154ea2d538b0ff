"""What agreement costs: `reports`, `collective`, a carried record, and a MIN all-reduce a step.

    python bench/consensus [--quick] [--spin] [--json] [FIGURE...]

README.md beside this file says what each figure is and how it is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "common"))
from measure import RANKS, Setting, measure
from quietly import torch
from report import about, show
from traffic import BATCH_S, BATCHES, QUERY_S, QUICKEST_S

from l3store.errors import nearest

_FULL, _QUICK = (10, 100), (3, 40)


def main() -> None:
    """Prints the table, or one JSON object."""
    given = _arguments()
    rounds, steps = _QUICK if given.quick else _FULL
    setting = Setting(rounds, steps, spins=given.spin)
    said = about(".")
    del said["file system"]
    said |= {
        "torch": f"{torch.__version__}, gloo over loopback; reports over tcp, loopback",
        "work": "2 ms between steps, "
        + ("of a busy core each (CRC-32, no GIL), CPU time" if given.spin else "asleep"),
        "4 processes": f"on {os.cpu_count()} CPUs"
        + (": oversubscribed" if (os.cpu_count() or 1) < max(RANKS) else ""),
        "label": "processes x tickets in flight",
        "tickets": f"query {QUERY_S * 1e3:.0f} ms, {BATCHES} batches of {QUICKEST_S * 1e3:.0f} ms, "
        f"or of {BATCH_S * 1e3:g} ms for each in flight if that is more; each a quarter more or "
        "less, told by a thread of its own",
        "rounds": f"{rounds} of {steps} steps of each kind, one kind after the other in turn; "
        "ratios are of medians over all steps of the rank with the highest, (lowest-highest round)",
        "verified": "each grant and settlement against the MIN of what the ranks have; at the end "
        "equal effects on all ranks, and no page reserved",
    }
    chosen = given.figures or list(map(str, RANKS))
    show(said, {name: partial(measure, int(name), setting) for name in chosen},
         as_json=given.json, last="by rank", spread="(rounds)")  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python bench/consensus", description="Agreement's cost.")
    names = list(map(str, RANKS))
    parser.add_argument("figures", nargs="*", metavar="FIGURE",
                        help=f"numbers of processes: {', '.join(names)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps")
    parser.add_argument("--spin", action="store_true", help="work is a busy core, not a sleep")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    given = parser.parse_args()
    for name in given.figures:
        if name not in names:
            parser.error(f"unknown figure {name!r}{nearest(name, names)}")
    return given


if __name__ == "__main__":
    main()
