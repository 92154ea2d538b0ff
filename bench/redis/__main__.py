"""The Redis store beside one raw connection, redis-py, and LMCache's own clients.

    python bench/redis [--quick] [--json] [--raw] [--dir DIR] [--venvs DIR] [FIGURE...]

README.md beside this file says what each figure is and how it is measured.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(1, str(Path(__file__).parents[1] / "common"))
from clients import VERSIONS
from measure import KINDS, SIZES, Setting, exists, memory, peers, transfers
from report import about, arguments, checked, folder_of_run, show

from l3store.config import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from figures import Figure

FIGURES: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "tcp": partial(transfers, transport="tcp"),
    "unix": partial(transfers, transport="unix"),
    "exists": exists,
    "memory": memory,
    "peers": peers,
}
_FULL, _QUICK = (5, 128 << 20), (2, 32 << 20)
_DISK = 0.1


def main() -> None:
    """Prints the table, or one JSON object."""
    parser = arguments("redis", "The Redis store beside other clients.", FIGURES)
    parser.add_argument("--raw", action="store_true", help="no peers, which need their wheels")
    parser.add_argument("--venvs", default=_cache(), help="where the peers' environment lies")
    parser.add_argument("--server", choices=KINDS, default=KINDS[0], help="which one")
    parser.add_argument("--page-bytes", type=_sizes, default=SIZES, metavar="SIZE,SIZE",
                        help="of sets and gets, such as 64KiB,1MiB")  # fmt: skip
    given = checked(parser, FIGURES, _DISK)
    chosen = given.figures or [name for name in FIGURES if not given.raw or name != "peers"]
    rounds, least = _QUICK if given.quick else _FULL
    with folder_of_run(given.dir) as folder:
        setting = Setting(
            folder, given.venvs, given.pairs or rounds, given.server, given.page_bytes, least
        )
        said = about(folder) | _about(setting)
        show(said, {name: partial(FIGURES[name], setting) for name in chosen},
             as_json=given.json, last="client's CPU, ours and the other's")  # fmt: skip


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(parse_size(part) for part in text.split(","))


def _cache() -> str:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(caches) / "l3store" / "bench-redis")


def _about(setting: Setting) -> dict[str, str]:
    with setting.server() as server:
        info = server.info("server")
        kind = "Valkey" if "valkey_version" in info else "Redis"
        named = info.get("valkey_version", info["redis_version"])
    return {
        "server": f"{kind} {named}, one thread, no persistence, on this machine",
        "raw": "one connection to a process that has the pages in its memory: sendall, recv_into",
        "redis-py": f"{version('redis')} with hiredis {version('hiredis')}: MSET of bytes; MGET "
        "and a copy into each page",
        "lmcache": VERSIONS,
        "ours": "bare: open(url, raw=True); verified: the stack of open(url)",
        "rounds": f"{setting.rounds}, all sides batch by batch, another one first; at least "
        f"{setting.least >> 20} MiB a side and round, its median batch counts; ratios are "
        "medians over rounds, (80 %) their range",
        "verified": "every page read was compared with what was written, outside the timed part",
    }


if __name__ == "__main__":
    main()
