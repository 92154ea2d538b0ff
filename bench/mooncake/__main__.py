"""The Mooncake store beside the calls of Mooncake's own library.

    python bench/mooncake [--quick] [--json] [FIGURE...]

README.md beside this file says what each figure is and how it is measured.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(1, str(Path(__file__).parents[1] / "common"))
from measure import SHAPES, Setting, exists, transfers
from report import about, arguments, checked, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from figures import Figure

FIGURES: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "two": partial(transfers, where="two"),
    "one": partial(transfers, where="one"),
    "exists": exists,
}
_DISK = 0.1


def main() -> None:
    """Prints the table, or one JSON object."""
    parser = arguments("mooncake", "The Mooncake store beside Mooncake's own calls.", FIGURES)
    given = checked(parser, FIGURES, _DISK)
    rounds, shapes, least = (2, SHAPES[1:4:2], 16 << 20) if given.quick else (5, SHAPES, 64 << 20)
    setting = Setting(given.pairs or rounds, shapes, least)
    wheel = next(
        f"{one.name} {one.version}" for one in distributions()
        if one.name.startswith("mooncake")
    )  # fmt: skip
    said = about(given.dir) | {
        "mooncake": f"{wheel}, tcp, on this machine; memory touched before",
        "two": "pages lie in the memory of another process; one: in that of this one",
        "calls": "batch_put_from_multi_buffers, batch_get_into_multi_buffers, batch_is_exist on "
        "the same client, names and addresses made before",
        "ours": "bare: open(url, raw=True); verified: open(url) with late=wait; staged: with "
        "late=staged, the default",
        "rounds": f"{setting.rounds}, sides take turns batch by batch; at least "
        f"{setting.least >> 20} MiB a side and round; ratios are medians, (80 %) their range",
        "proven": "every page read was compared with what was written, outside the timed part",
    }
    chosen = given.figures or list(FIGURES)
    show(said, {name: partial(FIGURES[name], setting) for name in chosen}, as_json=given.json)


if __name__ == "__main__":
    main()
