"""The nvme store against the raw loop, peers and its goals.

    python bench/nvme [--quick] [--json] [--dir DIR] [--venvs DIR] [FIGURE...]

README.md beside this file says what each figure is and how it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import against_peers
import against_raw
import counts
from disk import file_system, free_bytes
from figures import HEADINGS
from fio import fio
from ours import Setting
from peer import PEERS
from processes import processes

from l3store.errors import L3Error, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from figures import Figure

FIGURES: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "fresh": against_raw.fresh,
    "segments": against_raw.segments,
    "overwritten": against_raw.overwritten,
    "aged": against_raw.aged,
    "processes": processes,
    "sglang": against_peers.sglang,
    "raw_block": against_peers.raw_block,
    "fs_native": against_peers.fs_native,
    "start": counts.start,
    "exists": counts.exists,
    "fio": fio,
}
_FULL, _QUICK = (200, 1 << 30), (20, 384 << 20)
_DISK = 2.5


def main() -> None:
    """Prints the table, or one JSON object."""
    given = _arguments()
    chosen = given.figures or [name for name in FIGURES if not given.raw or name not in PEERS]
    pairs, capacity = _QUICK if given.quick else _FULL
    pairs = given.pairs or pairs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # as ctrl-C: clean up
    with tempfile.TemporaryDirectory(
        prefix="l3store-bench-", dir=given.dir, ignore_cleanup_errors=True
    ) as folder:
        setting = Setting(
            folder, given.venvs, pairs, capacity, given.workers, given.stack, tuple(given.option)
        )
        about = _about(setting) | {name: PEERS[name].said for name in chosen if name in PEERS}
        if not given.json:
            print("\n".join(f"{name}: {value}" for name, value in about.items()))
            print(f"\n{HEADINGS}", flush=True)
        figures = list(_measured(chosen, setting, quiet=given.json))
    if given.json:
        json.dump({**about, "figures": [one.as_json() for one in figures]}, sys.stdout, indent=1)
        print()
    else:
        judged = [figure.reached for figure in figures if figure.goals]
        print(f"load at the end: {os.getloadavg()[0]:.1f}")
        print(f"{sum(judged)} of {len(judged)} goals reached")


def _measured(chosen: list[str], setting: Setting, *, quiet: bool) -> Iterator[Figure]:
    for name in chosen:
        try:
            for figure in FIGURES[name](setting):
                if not quiet:
                    print(figure.line(), flush=True)
                yield figure
        except L3Error as error:
            raise SystemExit(f"figure {name}: {type(error).__name__}: {error}") from error


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python bench/nvme", description="The nvme store against the raw loop and peers."
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--quick", action="store_true", help="fewer pairs, a smaller store")
    parser.add_argument("--pairs", type=int, help="how many; 200, with --quick 20")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--raw", action="store_true", help="no peers, which need their wheels")
    parser.add_argument("--stack", action="store_true", help="ours inside registry.open's wrappers")
    parser.add_argument("--dir", default=".", help="where to measure; 2.5 GB are needed")
    parser.add_argument("--venvs", default=_cache(), help="where the peers' environments lie")
    parser.add_argument("--workers", type=int, default=4, help="of our store and the raw loop")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="of the store's URL; may be repeated")  # fmt: skip
    given = parser.parse_args()
    for name in given.figures:
        if name not in FIGURES:
            parser.error(f"unknown figure {name!r}{nearest(name, FIGURES)}")
    if not os.path.isdir(given.dir):
        parser.error(f"--dir {given.dir}: no such folder")
    if file_system(given.dir) in ("tmpfs", "ramfs"):
        parser.error(f"--dir {given.dir} lies in memory: name a folder on a disk")
    if free_bytes(given.dir) < (_DISK + 0.5) * 1e9:
        parser.error(f"--dir {given.dir} has {free_bytes(given.dir) / 1e9:.1f} GB free of {_DISK}")
    return given


def _cache() -> str:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(caches) / "l3store" / "bench-nvme")


def _about(setting: Setting) -> dict[str, str]:
    """What a reader must know of every figure below."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}",
        "file system": file_system(setting.folder),
        "ours": setting.url("DIR", setting.capacity)
        + (", inside its wrappers" if setting.stacked else ", bare, pages checked in its workers"),
        "raw loop": f"preadv and pwritev, O_DIRECT, {setting.workers} threads, the same runs, "
        "no index, no checksum, no header",
        "pairs": f"{setting.pairs} a figure, alternated batch by batch, each first in turn; ratios "
        "are medians over pairs, (80 %) holds eight of ten",
        "verified": "every page read was compared with what was written, outside the timed part",
    }


if __name__ == "__main__":
    main()
