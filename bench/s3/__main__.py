"""The S3 store beside obstore and boto3 as people write them, and LMCache's own client.

    python bench/s3 [--quick] [--json] [--dir DIR] [--lmcache PYTHON] [FIGURE...]

README.md beside this file says what each figure is and how it is measured.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(1, str(Path(__file__).parents[1] / "common"))
from measure import SIZES, Setting, ceiling, exists, peers, real, transfers
from pages import size_name
from report import about, arguments, checked, folder_of_run, show
from sides import THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from figures import Figure

FIGURES: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "ceiling": ceiling,
    **{size_name(size).replace(" ", ""): partial(transfers, size=size) for size in SIZES},
    "exists": exists,
    "real": real,
    "peers": peers,
}
_FULL, _QUICK = (5, 64 << 20), (2, 16 << 20)
_DISK = 2.0


def main() -> None:
    """Prints the table, or one JSON object."""
    parser = arguments("s3", "The S3 store beside other clients.", FIGURES)
    parser.add_argument("--lmcache", help="a Python that has lmcache and awscrt; else no peers")
    given = checked(parser, FIGURES, _DISK)
    if "peers" in given.figures and not given.lmcache:
        parser.error("figure peers needs --lmcache")
    chosen = given.figures or [name for name in FIGURES if given.lmcache or name != "peers"]
    rounds, least = _QUICK if given.quick else _FULL
    with folder_of_run(given.dir) as folder:
        setting = Setting(folder, given.lmcache or "", given.pairs or rounds, least)
        said = about(folder) | {
            "server": "the stub: in memory, one Python thread, on this machine; real: SeaweedFS",
            "obstore": f"{version('obstore')} in {THREADS} threads, and a copy into each page",
            "boto3": f"{version('boto3')}, the same, checksums when_required",
            "ours": "verified: the stack of open(url); bare: open(url, raw=True)",
            "rounds": f"{rounds if given.pairs is None else given.pairs}, batch by batch in turn, "
            f"another side first each time; at least {least >> 20} MiB a side and round",
            "verified": "every page read was compared with what was written, after the timed part",
        }
        show(said, {name: partial(FIGURES[name], setting) for name in chosen},
             as_json=given.json)  # fmt: skip


if __name__ == "__main__":
    main()
