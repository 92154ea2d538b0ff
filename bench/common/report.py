"""What the benchmarks of this folder's siblings have in common: arguments, a folder, a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from disk import file_system, free_bytes
from figures import headings

from l3store.errors import L3Error, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from figures import Figure

__all__ = ["about", "arguments", "checked", "folder_of_run", "show"]


def arguments(name: str, text: str, figures: Collection[str]) -> argparse.ArgumentParser:
    """Returns a parser of what all take; `checked` reads the command line with it."""
    parser = argparse.ArgumentParser(prog=f"python bench/{name}", description=text)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(figures))
    parser.add_argument("--quick", action="store_true", help="fewer pairs, a smaller store")
    parser.add_argument("--pairs", type=int, help="how many a figure")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--dir", default=".", help="where to measure: a folder on a disk")
    return parser


def checked(
    parser: argparse.ArgumentParser, figures: Collection[str], gigabytes: float
) -> argparse.Namespace:
    """Returns the arguments, or ends the program with what is wrong about them.

    Args:
        parser: Of `arguments`.
        figures: All there are.
        gigabytes: What a run takes in its folder.
    """
    given = parser.parse_args()
    for name in given.figures:
        if name not in figures:
            parser.error(f"unknown figure {name!r}{nearest(name, figures)}")
    if given.pairs is not None and given.pairs < 1:
        parser.error(f"--pairs {given.pairs}: at least 1")
    if not os.path.isdir(given.dir):
        parser.error(f"--dir {given.dir}: no such folder")
    if file_system(given.dir) in ("tmpfs", "ramfs"):
        parser.error(f"--dir {given.dir} lies in memory: name a folder on a disk")
    if free_bytes(given.dir) < (gigabytes + 0.5) * 1e9:
        free = free_bytes(given.dir) / 1e9
        parser.error(f"--dir {given.dir} has {free:.1f} GB free of {gigabytes}")
    return given


@contextmanager
def folder_of_run(inside: str) -> Iterator[str]:
    """Gives a new folder, which is gone at the end, also after ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # as ctrl-C: clean up
    with tempfile.TemporaryDirectory(
        prefix="l3store-bench-", dir=os.path.abspath(inside), ignore_cleanup_errors=True
    ) as folder:
        yield folder


def about(folder: str) -> dict[str, str]:
    """What a reader must know of the machine."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}",
        "file system": file_system(folder),
    }


def show(
    said: Mapping[str, str],
    figures: Mapping[str, Callable[[], Iterator[Figure]]],
    *,
    as_json: bool,
    spread: str = "(80 %)",
    last: str = "bytes proven",
) -> None:
    """Measures, and prints each figure as it comes; as JSON all of them at the end.

    Args:
        said: What a reader must know of every figure.
        figures: Each gives its lines.
        as_json: One object instead of a table.
        spread: What the range of ratios is.
        last: What the notes are.
    """
    if as_json:
        seen = [one.as_json() for one in _measured(figures)]
        json.dump({**said, "load at the end": os.getloadavg()[0], "figures": seen},
                  sys.stdout, indent=1)  # fmt: skip
        print()
        return
    print("\n".join(f"{name}: {value}" for name, value in said.items()))
    print(f"\n{headings(spread, last)}", flush=True)
    judged = []
    for figure in _measured(figures):
        print(figure.line(), flush=True)
        if figure.goals:
            judged.append(figure.reached)
    print(f"load at the end: {os.getloadavg()[0]:.1f}")
    print(f"{sum(judged)} of {len(judged)} goals reached")


def _measured(figures: Mapping[str, Callable[[], Iterator[Figure]]]) -> Iterator[Figure]:
    for name, measure in figures.items():
        try:
            yield from measure()
        except L3Error as error:
            raise SystemExit(f"figure {name}: {type(error).__name__}: {error}") from error
