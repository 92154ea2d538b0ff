"""What grows with pages and processes: a start with 1e6 pages, lookups beside peer processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from disk import Files
from figures import Figure, Pairs, at_most, paired
from ours import PLACE, Store
from pages import SHAPES, Batch, Memory, Shape

from l3store import page, registry
from l3store.backends.nvme.format import (
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    Geometry,
    Superblock,
    pack_record,
)
from l3store.backends.nvme.segment import segment_name
from l3store.keys import Chain
from l3store.replay.engine import page_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from ours import Setting

__all__ = ["exists", "start"]

_PAGES = 1_000_000
_CHAIN = 128
_SMALL = Shape(4096, _CHAIN)
_LOOKUPS = 3000


def start(setting: Setting) -> Iterator[Figure]:
    """Opens a store of 1e6 pages in a new process and asks for 128 of them.

    The store's segments and slot tables are written in its format, with real headers; the payloads
    are holes in the files, as nobody reads them: 0.3 GB instead of 4.3.
    """
    folder = setting.new_folder("million")
    segment_bytes = 256 << 20
    per_segment = Geometry(segment_bytes, _SMALL.page_bytes).slots
    segments = -(-_PAGES // per_segment)
    url = (
        f"nvme://{folder}?capacity={(segments + 4) * segment_bytes}&segment={segment_bytes}"
        f"&workers={setting.workers}"
    )
    sizes = _make_million(url, folder, per_segment)
    try:
        for opened, state in enumerate(("cold", "warm")):
            if state == "cold":
                Files(folder).drop()
            seen = _in_new_process(_open_million, (url, sizes, opened))
            yield Figure(
                f"start with {_PAGES} pages, slot tables {state}", "s", seen["seconds"],
                goals=(at_most(seen["seconds"], 2.5),),
                note=f"{seen['read'] / 1e6:.0f} MB read; {seen['cpu']:.2f} CPU s",
            )  # fmt: skip
        for what, taken in (("after the start", "open"), ("after a first write", "written")):
            value = seen[taken] / _PAGES
            yield Figure(
                f"memory a page, {what}", "B", value, goals=(at_most(value, 240),),
                note="growth of resident memory",
            )  # fmt: skip
        yield Figure("first page_set: takes over what a dead process owned", "s", seen["first"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_million(url: str, folder: str, per_segment: int) -> list[int]:
    """Returns the pages of each segment."""
    with registry.open(url, raw=True) as backend:  # marker, writer, a real superblock
        memory = Memory(_SMALL)
        batch = Batch.numbered(0, _SMALL, PLACE)
        backend.page_set(batch.keys, memory.sealed(batch, 0, PLACE))
    first = os.path.join(folder, segment_name(0))
    block = Superblock.parse(Path(first).read_bytes()[:SUPERBLOCK_BYTES], 0, 256 << 20)
    sizes: list[int] = []
    while sum(sizes) < _PAGES:
        number = len(sizes)
        count = min(per_segment, _PAGES - sum(sizes))
        one = replace(block, number=number, identity=os.urandom(16))
        with open(os.path.join(folder, segment_name(number)), "wb") as file:
            file.write(one.pack())
            file.write(_table(sum(sizes), count))
            file.truncate(block.geometry.segment_bytes)
        sizes.append(count)
    return sizes


def _table(first: int, count: int) -> bytes:
    payload = memoryview(bytes(_SMALL.page_bytes))
    table = bytearray()
    for at in range(first, first + count, _CHAIN):
        chain = Chain(page_hashes(0, range(at, min(at + _CHAIN, first + count))))
        for sealed in page.seal(PLACE, chain, [(payload,)] * len(chain)):
            table += pack_record(sealed[0], 1 + at, _SMALL.page_bytes)
    if len(table) != count * RECORD_BYTES:
        raise SystemExit("the table of a segment has another length than its slots")
    return bytes(table)


def _open_million(url: str, sizes: list[int], opened: int) -> dict[str, float]:
    """What a process sees that opens the store after `opened` others, which wrote a batch each."""
    memory = Memory(_SMALL)
    registry.backend_class("nvme")
    gc.collect()
    resident, read = _resident(), _read_bytes()
    cpu, wall = time.process_time(), time.perf_counter()
    backend = registry.open(url, raw=True)
    # The first chain of the second segment: chains begin anew with each.
    asked = Chain(page_hashes(0, range(sizes[0], sizes[0] + _CHAIN))).keys(PLACE)
    found = backend.batch_exists(asked)
    seconds = time.perf_counter() - wall
    seen = {"seconds": seconds, "cpu": time.process_time() - cpu, "read": _read_bytes() - read}
    gc.collect()
    seen["open"] = _resident() - resident
    stored = sum(usage.pages for usage in backend.usage())
    wanted = sum(sizes) + opened * _CHAIN
    if found != _CHAIN or stored != wanted:
        raise SystemExit(f"{stored} of {wanted} pages are there, {found} of {_CHAIN} asked for")
    batch = Batch.numbered(_PAGES + opened, _SMALL, PLACE)
    pages = memory.sealed(batch, 0, PLACE)
    wall = time.perf_counter()
    done = backend.page_set(batch.keys, pages)
    seen["first"] = time.perf_counter() - wall
    gc.collect()
    seen["written"] = _resident() - resident
    if not all(done):
        raise SystemExit("the store with 1e6 pages did not take a batch")
    backend.close()
    return seen


def _in_new_process(call: Callable[..., dict[str, float]], given: tuple) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_send, args=(theirs, call, given))
    child.start()
    theirs.close()
    try:
        seen: dict[str, float] = ours.recv()
    except EOFError:
        raise SystemExit("a process ended with an error, told above") from None
    finally:
        child.join()
    return seen


def _send(answer: Connection, call: Callable[..., dict[str, float]], given: tuple) -> None:
    answer.send(call(*given))


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status tells no VmRSS")


def _read_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes"):
            return int(line.split()[1])
    raise SystemExit("/proc/self/io tells no read_bytes")


def exists(setting: Setting) -> Iterator[Figure]:
    """`batch_exists` of 128 stored keys: alone, and beside 1 to 4 processes that have written.

    What a peer costs is the difference to a store without peers, lookup by lookup in turn.
    """
    shape = SHAPES[0]
    memory, batch = Memory(shape), Batch.numbered(0, shape, PLACE)
    capacity = setting.capacity // 4
    lone = Store.new(setting, shape, memory, "lone", capacity=capacity)
    store = Store.new(setting, shape, memory, "ours", "writers=5", capacity=capacity)
    url = setting.url(store.folder, capacity, "writers=5")
    spawn = multiprocessing.get_context("spawn")
    peers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
    try:
        lone.write(batch, 0)
        store.write(batch, 0)
        alone, _, _ = _lookups_us(lone, lone, batch)
        yield Figure("batch_exists of 128 keys, alone", "us", alone, pairs=_LOOKUPS,
                     goals=(at_most(alone, 60),))  # fmt: skip
        for number in range(1, 5):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_write_and_wait, args=(theirs, setting, url, number))
            process.start()
            peers.append((process, ours))
            theirs.close()
            if not ours.recv():
                raise SystemExit("a peer process could not write")
            theirs_too = Batch.numbered(number, shape, PLACE)
            if store.backend.batch_exists(theirs_too.keys) != shape.batch:
                raise SystemExit("a page of a peer process is not seen by the next call")
            value, alone, more = _lookups_us(store, lone, batch)
            yield Figure(
                f"batch_exists of 128 keys, {number} peer process{'es' * (number > 1)}", "us",
                value, alone, "alone", value / alone, pairs=_LOOKUPS,
                goals=(at_most(more / number, 1)._replace(text="<= 1 us a peer"),),
                note=f"{more / number:+.2f} us a peer",
            )  # fmt: skip
    finally:
        for process, pipe in peers:
            pipe.close()
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
        store.close()
        lone.close()


def _lookups_us(one: Store, other: Store, batch: Batch) -> tuple[float, float, float]:
    """Returns the medians of both, and of the differences of neighbouring lookups."""
    pairs = Pairs(0)
    paired(_LOOKUPS, lambda _: one.exists(batch), lambda _: other.exists(batch), pairs)
    ours, theirs = ([half.wall * 1e6 for half in side] for side in (pairs.ours, pairs.other))
    more = median(a - b for a, b in zip(ours, theirs, strict=True))
    return median(ours), median(theirs), more


def _write_and_wait(told: Connection, setting: Setting, url: str, number: int) -> None:
    shape = SHAPES[0]
    with registry.open(url, raw=not setting.stacked) as backend:
        memory = Memory(shape)
        batch = Batch.numbered(number, shape, PLACE)
        told.send(all(backend.page_set(batch.keys, memory.sealed(batch, 0, PLACE))))
        try:
            told.recv()  # the end of the pipe
        except EOFError:
            return
