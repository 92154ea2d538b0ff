"""What is measured: our adapter, both ways, against `file`; pages of one geometry at a time."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine import Geometry
from figures import Figure, Pairs, at_most, paired
from memory import BATCH, Memory
from side import Side

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SHAPES", "Setting", "measure", "new_side"]

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = {64 * _KIB: (16, 8), 128 * _KIB: (16, 16), _MIB: (64, 32)}
"""Of a page: its tokens, and layers of 512 bytes a token."""
_GOAL_AT = 128 * _KIB
_TIME, _CPU = 0.65, 0.25
_WAYS: dict[str, dict[str, object]] = {"v1": {"interface_v1": 1}, "generic": {}}


@dataclass(frozen=True)
class Setting:
    """What one run is told."""

    folder: str
    pairs: int
    stored: int
    """Bytes that each side holds, at most; at least two batches."""
    url: str
    """Options of our store."""


def _geometry(page_bytes: int, *, mla: bool, layout: str) -> Geometry:
    tokens, layers = _SIZES[page_bytes]
    if mla:
        return Geometry(mla, layout, tokens, layers // 2, 1024)
    return Geometry(mla, layout, tokens, layers, 512)


SHAPES = {
    f"{'mla' if mla else 'mha'}-{size // _KIB}k{'-layers' if layout == 'layer_first' else ''}":
    _geometry(size, mla=mla, layout=layout)
    for layout, sizes in (("page_first", tuple(_SIZES)), ("layer_first", (_GOAL_AT,)))
    for mla in (False, True)
    for size in sizes
}  # fmt: skip


def measure(setting: Setting, geometry: Geometry) -> Iterator[Figure]:
    """All figures of pages of one geometry: reads, writes, lookups, each way in turn."""
    with ExitStack() as stack:
        memory = Memory(geometry)
        fits = max(2, setting.stored // memory.batch_bytes)
        file = new_side(setting, "file", memory, stack)
        ours = {way: new_side(setting, way, memory, stack) for way in _WAYS}
        shape = f"{geometry.page_bytes // _KIB} KiB {geometry.name}, {geometry.segments} segm."
        writes = {way: Pairs(memory.batch_bytes) for way in ours}
        _fill(file, ours, fits, writes)
        for way, side in ours.items():
            reads = Pairs(memory.batch_bytes)
            _read(side, file, memory, setting.pairs, fits, reads)
            judged = geometry.page_bytes == _GOAL_AT
            proof = f"{side.reads.proof('device')}; file {file.reads.proof('device')}"
            yield Figure.times(
                f"read, cold, {way}, {shape}", reads, "file", most=_TIME if judged else None,
                note=proof,
            )  # fmt: skip
            share = reads.cpu(reads.ours) / reads.cpu(reads.other)
            goals = [at_most(share, _CPU)] if judged and way == "v1" else []
            yield Figure.cpus("  CPU", reads, "file", goals)
            if way == "generic":
                yield _sglangs_own(memory, reads, stack)
            yield Figure.times(f"write, {way}, {shape}", writes[way], "file")
            yield Figure.cpus("  CPU", writes[way], "file")
        lookups = Pairs(0)
        paired(
            setting.pairs,
            lambda i: ours["v1"].exists(i % fits),
            lambda i: file.exists((i + fits // 2) % fits),
            lookups,
        )
        yield Figure.times(f"batch_exists of {BATCH} keys, {shape}", lookups, "file")


def _sglangs_own(memory: Memory, reads: Pairs, stack: ExitStack) -> Figure:
    """What generic reads cost before a store has done anything: no store can go below it."""
    nothing = Side("nothing", memory, "", "dynamic", _loaded("nothing", "side", "Nothing"))
    stack.callback(nothing.close)
    calls = Pairs(memory.batch_bytes, [nothing.call(turn) for turn in range(len(reads.ours))])
    own, file = calls.cpu(calls.ours), reads.cpu(reads.other)
    return Figure("  CPU, sglang's own part of it", "CPU s/GB", own, file, "file", own / file)


def _loaded(name: str, module: str, kind: str, **more: object) -> dict[str, Any]:
    """Returns an extra config with which sglang loads a backend that is not its own."""
    return {"backend_name": name, "module_path": module, "class_name": kind, **more}


def new_side(setting: Setting, way: str, memory: Memory, stack: ExitStack) -> Side:
    folder = os.path.join(setting.folder, way)
    os.mkdir(folder)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    if way == "file":
        side = Side("sglang's file", memory, folder, "file", {"file_storage_path": folder})
    else:
        extra = _loaded(
            "l3store", "l3store.adapters.sglang", "L3StoreHiCache", weights_revision="bench",
            url=f"nvme://{folder}?{setting.url}", **_WAYS[way],
        )  # fmt: skip
        side = Side(f"ours, {way},", memory, folder, "dynamic", extra)
    stack.callback(side.close)
    wanted = "_page_get_zero_copy" if way == "v1" else "_generic_page_get"
    if side.way != wanted:
        raise SystemExit(f"sglang's controller reads from {side.name} by {side.way}, not {wanted}")
    return side


def _fill(file: Side, ours: dict[str, Side], fits: int, writes: dict[str, Pairs]) -> None:
    """Stores the same batches on all sides; a file's time stands against each way's."""
    sides = [file, *ours.values()]
    for number in range(fits):
        turned = number % len(sides)  # each first in turn
        halves = {side: side.write(number) for side in sides[turned:] + sides[:turned]}
        for way, side in ours.items():
            writes[way].ours.append(halves[side])
            writes[way].other.append(halves[file])


def _read(side: Side, file: Side, memory: Memory, count: int, fits: int, reads: Pairs) -> None:
    side.reads.reset()
    file.reads.reset()
    while count:
        side.files.drop()
        file.files.drop()  # each byte is read once until the next time
        part = min(count, fits)
        paired(
            part,
            lambda i: side.read(i, i),
            lambda i: file.read((i + fits // 2) % fits, i + memory.turns // 2),
            reads,
        )
        count -= part
