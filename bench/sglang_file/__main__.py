"""sglang's `file` backend and our adapter over nvme, side by side in sglang's cache controller.

    .venv-sglang/bin/python bench/sglang_file [--quick] [--json] [--dir DIR] [FIGURE...]

README.md beside this file says what each figure is and how it is measured.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "common"))
from engine import set_up
from measure import SHAPES, Setting, measure
from memory import BATCH
from report import about, arguments, checked, folder_of_run, show

_FULL, _QUICK = (100, 512 << 20), (20, 256 << 20)
_DISK = 2.5


def main() -> None:
    """Prints the table, or one JSON object."""
    parser = arguments(
        "sglang_file", "sglang's `file` and our adapter in sglang's cache controller.", SHAPES
    )
    parser.add_argument("--options", default="capacity=1GiB&segment=128MiB",
                        help="of our store's URL")  # fmt: skip
    given = checked(parser, SHAPES, _DISK)
    pairs, stored = _QUICK if given.quick else _FULL
    with folder_of_run(given.dir) as folder:
        setting = Setting(folder, given.pairs or pairs, stored, given.options)
        set_up()
        said = about(folder) | {
            "engine": f"sglang {version('sglang')}, its HybridCacheController, torch "
            f"{version('torch')} on CPU",
            "file": "sglang's own backend, by its controller's generic page calls; buffered",
            "ours": f"L3StoreHiCache, nvme://DIR?{setting.url}",
            "pairs": f"{setting.pairs} a figure of reads and lookups; ms a batch of {BATCH} pages; "
            "alternated batch by batch, each first in turn; ratios are medians over pairs (of CPU: "
            "of the sums), (80 %) holds eight of ten pairs",
            "page cache": "dropped on both sides before each byte is read again; the last column "
            "is what the kernel counted as read from the device",
            "verified": "every page read was compared with what was written, outside the timed "
            "part",
        }
        chosen = given.figures or list(SHAPES)
        show(said, {name: partial(measure, setting, SHAPES[name]) for name in chosen},
             as_json=given.json)  # fmt: skip


if __name__ == "__main__":
    main()
