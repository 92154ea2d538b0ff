"""One rank, a process of its own: it joins all groups, and steps the one that it is told to."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter, sleep, thread_time
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from quietly import torch
from sides import RULER, SIDES, Side, new_side
from torch.distributed import TCPStore

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from traffic import Moment

__all__ = ["WORK_S", "Bout", "Proof", "Seen", "be_rank"]

WORK_S = 0.002
_CHUNK = bytes(1 << 15)
_WARM = 20
_LONGEST_DRAIN = 20_000


class Bout(NamedTuple):
    """What all ranks are told to do with one group."""

    kind: str
    tickets: int
    steps: int
    spins: bool
    """Work is a core that is busy, else one that sleeps."""
    idle: bool = False
    """Nothing changes while it is measured."""


@dataclass
class Seen:
    """What one rank saw of a bout, its warm-up left out."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    """CPU of the new tickets of a step."""
    seconds: float = 0.0
    changes: int = 0
    ended: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


class Proof(NamedTuple):
    """What one rank says at the end of a phase."""

    digest: str
    ended: int
    completed: dict[int, Moment]
    settled: dict[int, Moment]
    closest: float
    """Shortest time between two reports."""


def be_rank(pipe: Connection, parent: int, rank: int, ranks: int) -> None:
    """Runs in a process of its own until it is told that all is over."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no stray is left
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(pipe, rank, ranks)
    except (EOFError, KeyboardInterrupt):
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of gloo may be in a call
    os._exit(0)


def _serve(pipe: Connection, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    sides = _join(pipe, rank, ranks)
    gc.collect()
    gc.freeze()  # as engines do when they are warm: torch's heap is none of ours
    pipe.send(None)
    while (told := pipe.recv()) is not None:
        pipe.send(_drain(sides[told], rank) if isinstance(told, str) else _bout(sides, told))
    for side in sides.values():
        side.close()
    pipe.send(None)


def _join(pipe: Connection, rank: int, ranks: int) -> dict[str, Side]:
    port = pipe.recv()
    store = TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), False)
    if rank == 0:
        pipe.send(store.port)
    return {kind: new_side(kind, store, rank, ranks) for kind in SIDES}


def _bout(sides: dict[str, Side], told: Bout) -> Seen:
    side, seen = sides[told.kind], Seen()
    engine = side.engine
    if engine and not told.idle:
        engine.reads.tickets = told.tickets
        engine.reads.resume()
    for number in range(-_WARM, told.steps):
        if number == 0:
            before = _so_far(side)
            seen.seconds = -perf_counter()
        _work(spins=told.spins)
        cost, effects = side.step(told.tickets)
        inputs = 0.0
        if engine:
            engine.carry_out(effects)
            inputs = thread_time()
            engine.submit(told.tickets)
            inputs = thread_time() - inputs
        if number >= 0:
            seen.wall.append(cost.wall)
            seen.cpu.append(cost.cpu)
            seen.inputs.append(inputs)
    seen.seconds += perf_counter()
    after = _so_far(side)
    if engine:
        engine.reads.pause()
    seen.changes, seen.ended = after[0] - before[0], after[1] - before[1]
    seen.calls, seen.bytes = _less(after[2], before[2]), _less(after[3], before[3])
    return seen


def _so_far(side: Side) -> tuple[int, int, dict[str, int], dict[str, int]]:
    changes, ended = (side.engine.reads.changes, side.engine.ended) if side.engine else (0, 0)
    return changes, ended, dict(side.counter.calls), dict(side.counter.bytes)


def _less(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {what: count - before.get(what, 0) for what, count in after.items()}


def _work(*, spins: bool) -> None:
    """Two milliseconds; the GIL is free in them, as in an engine's kernels."""
    if not spins:
        sleep(WORK_S)
        return
    until = thread_time() + WORK_S
    while thread_time() < until:
        crc32(_CHUNK)


def _drain(side: Side, rank: int) -> Proof:
    """Steps until no ticket is open: equally often on every rank."""
    engine = side.engine
    if engine is None:
        raise SystemExit(f"{RULER} has no tickets")
    engine.reads.resume()
    for _ in range(_LONGEST_DRAIN):
        if engine.drained:
            break
        sleep(WORK_S)
        engine.carry_out(side.step(0)[1])
    engine.reads.pause()
    digest, ended = engine.proof()
    proof = Proof(digest, ended, engine.reads.completed, engine.settled, side.counter.closest)
    engine.reads.completed, engine.settled = {}, {}
    return proof
