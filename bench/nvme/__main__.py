"""The nvme store against the raw loop, peers and its goals.

    python bench/nvme [--quick] [--json] [--dir DIR] [--venvs DIR] [FIGURE...]

README.md beside this file says what each figure is and how it is measured.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(1, str(Path(__file__).parents[1] / "common"))
import against_peers
import against_raw
import counts
from fio import fio
from ours import Setting
from peer import PEERS
from processes import processes
from report import about, arguments, checked, folder_of_run, show

from l3store.backends.nvme import NvmeOptions

if TYPE_CHECKING:
    import argparse
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
    with folder_of_run(given.dir) as folder:
        setting = Setting(
            folder, given.venvs, given.pairs or pairs, capacity, given.workers, given.stack,
            tuple(given.option),
        )  # fmt: skip
        said = _about(setting) | {name: PEERS[name].said for name in chosen if name in PEERS}
        show(said, {name: partial(FIGURES[name], setting) for name in chosen}, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = arguments("nvme", "The nvme store against the raw loop and peers.", FIGURES)
    parser.add_argument("--raw", action="store_true", help="no peers, which need their wheels")
    parser.add_argument("--stack", action="store_true", help="ours inside registry.open's wrappers")
    parser.add_argument("--venvs", default=_cache(), help="where the peers' environments lie")
    parser.add_argument("--workers", type=int, default=NvmeOptions().threads,
                        help="of our store and the raw loop")  # fmt: skip
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="of the store's URL; may be repeated")  # fmt: skip
    return checked(parser, FIGURES, _DISK)


def _cache() -> str:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(caches) / "l3store" / "bench-nvme")


def _about(setting: Setting) -> dict[str, str]:
    """What a reader must know of every figure below."""
    return about(setting.folder) | {
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
