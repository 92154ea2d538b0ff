"""Run by the Python of `.venv-sglang`: what the adapter's benchmarks see and refuse, as JSON.

    _in_sglang.py FOLDER

Small host pools and few pages: nothing here is about time.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(1, f"{sys.path[1]}/common")
sys.path.insert(1, f"{sys.path[2]}/sglang_file")
import adapter_cost
import memory
import overhead
from engine import Geometry, set_up
from measure import SHAPES, Setting, measure, new_side
from memory import BATCH, Memory
from side import Side

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = Geometry(mla=False, layout="page_first", tokens=4, layers=4, row_bytes=512)


def refused(call: Callable[[], object]) -> str:
    """Returns why a run ended, "" if it did not."""
    try:
        call()
    except SystemExit as error:
        return str(error)
    return ""


def figures(folder: str) -> list[dict[str, Any]]:
    setting = Setting(folder, 3, 0, "capacity=64MiB")
    # A page of the size that has goals, and one of another.
    shapes = [SHAPES["mla-128k"], SHAPES["mha-64k"]._replace(layout="layer_first")]
    return [one.as_json() for shape in shapes for one in measure(setting, shape)]


def refusals(folder: str) -> dict[str, str]:
    """Bytes that are wrong, missing or never came, a store that forgets, reads that were warm."""
    seen = {}
    setting = Setting(folder, 1, 0, "capacity=64MiB")
    with ExitStack() as stack:
        small = Memory(SMALL)
        file, ours = (new_side(setting, way, small, stack) for way in ("file", "v1"))
        for side in (file, ours):
            for number in (0, 1):
                side.write(number)
        file.files.drop()
        file.read(0, 0)
        seen["dropped"] = file.reads.proof("device")
        file.reads.reset()
        file.read(0, 0)
        seen["not dropped"] = file.reads.proof("device")
        seen["all well"] = refused(lambda: (file.read(1, 0), ours.read(1, 0), ours.exists(1)))
        page = next(Path(folder, "file").glob(f"{memory.names(0)[5]}*"))
        data = bytearray(page.read_bytes())
        data[1000] ^= 1
        page.write_bytes(data)
        seen["a flipped bit"] = refused(lambda: file.read(0, 0))
        page.unlink()
        seen["a page less"] = refused(lambda: file.read(0, 0))
        seen["a lookup less"] = refused(lambda: file.exists(0))
        for segment in Path(folder, "v1").glob("*"):
            if segment.is_file() and segment.stat().st_size > BATCH * SMALL.page_bytes:
                damage(segment, 1)
        seen["a flipped bit of ours"] = refused(lambda: ours.read(1, 0))
        extra = {"backend_name": "n", "module_path": "side", "class_name": "Nothing"}
        nothing = Side("nothing", small, folder, "dynamic", extra)
        stack.callback(nothing.close)
        seen["nothing came"] = refused(lambda: nothing.read(0, 0))
        seen["nothing went"] = refused(lambda: nothing.write(0))
    return seen


def damage(path: Path, number: int) -> None:
    """Flips a bit of a page of batch `number` in a file that holds it."""
    start = bytes.fromhex(memory.names(number)[7])  # how its payload begins
    data = path.read_bytes()
    found = [at for at in range(0, len(data), 4096) if data.startswith(start, at)]
    for at in found:
        with path.open("r+b") as file:
            file.seek(at + 100)
            file.write(bytes([data[at + 100] ^ 1]))
            os.fsync(file.fileno())


def costs(folder: str) -> dict[str, Any]:
    overhead.REPEATS = 2
    adapter_cost.announce(folder)
    adapter_cost.GEOMETRIES = tuple(adapter_cost.GEOMETRIES[i] for i in (0, 1, 2))
    seen = [
        {"what": one.what, "unit": one.unit, "goal": one.goal, "values": len(one.values)}
        for one in adapter_cost.costs()
    ]
    adapter_cost.Nothing.page_get = lambda self, keys, into, check=None: [False] * len(keys)
    adapter = adapter_cost.Adapter(adapter_cost.GEOMETRIES[0])
    return {"figures": seen, "refused": refused(lambda: adapter.cost("get"))}


def main() -> None:
    folder = Path(sys.argv[1])
    memory.pool_bytes = lambda: 1 << 20
    for name in ("a", "b", "c"):
        (folder / name).mkdir()
    set_up()
    seen = {
        "figures": figures(str(folder / "a")),
        "left": sorted(os.listdir(folder / "a")),
        "refusals": refusals(str(folder / "b")),
        "costs": costs(str(folder / "c")),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
