"""What each process of `two_ranks.Pair` runs: a `Rank` that steps together with its peer."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

# sglang's own check that what it takes for agreed is the same on all ranks; read when imported.
os.environ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"

import torch
import torch.distributed
from hicache_rank import Geometry, Position, Rank, differing, tokens
from sglang.srt.utils import rank_consensus_checker
from two_ranks import Recall, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

__all__ = ["serve"]

_PROMPT = tokens(20)


def serve(number: int, folder: str, pipe: Connection, seconds: float) -> None:
    """Does what the pipe says until its other end is closed.

    Args:
        number: Of this rank.
        folder: Where both ranks meet.
        pipe: Takes (method, *arguments), gives (True, answer) or (False, traceback).
        seconds: The longest that one rank waits for the other.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path.append(str(Path(__file__).parent / "plugins"))
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    world = torch.distributed.group.WORLD
    rank_consensus_checker.configure([SimpleNamespace(cpu_group=world)])
    served = _Served(number)
    with suppress(EOFError):
        while True:
            name, *args = pipe.recv()
            try:
                pipe.send((True, getattr(served, name)(*args)))
            except Exception:
                pipe.send((False, traceback.format_exc()))


class _Served:
    """What a `Pair` can ask of a rank."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._control = torch.distributed.new_group()  # apart from what sglang agrees on
        self._rank: Rank | None = None
        self._written: dict[str, torch.Tensor] = {}

    def start(self, model: Path, topology: Topology, extra: Mapping[str, Any]) -> None:
        """Starts anew, with nothing in L1 and L2."""
        if self._rank is not None:
            self._rank.close()
        there = {topology.axis: self._number, f"{topology.axis}_size": 2}
        group = torch.distributed.group.WORLD
        position = Position(**there, group=group, agree=self._agree)
        self._rank = Rank(model, extra, Geometry(mla=topology.mla), position)

    def write(self, same: bool) -> None:
        """Puts a prompt's KV into L1 and L2, and into L3 what this rank is to write of it.

        Args:
            same: All ranks have the same KV.
        """
        self._written = self._rank.insert(_PROMPT, seed=0 if same else self._number)
        self._rank.backup()

    def recall(self) -> Recall:
        """Forgets L1 and L2, and gets of the prompt what the store has."""
        rank = self._rank
        rank.wipe()
        free = rank.host_free
        loaded = rank.prefetch(_PROMPT)
        back = rank.load_back(_PROMPT)
        count = len(next(iter(back.values())))
        wrong = differing(back, {name: rows[:count] for name, rows in self._written.items()})
        # What was allocated for a tail that did not come is freed some steps later.
        with suppress(TimeoutError):
            rank.pump(lambda: rank.host_free == free - loaded)
        return Recall(loaded, count, wrong, free - loaded - rank.host_free)

    def _agree(self, done: bool) -> bool:
        everyone = torch.tensor(int(done))
        torch.distributed.all_reduce(everyone, torch.distributed.ReduceOp.MIN, group=self._control)
        return bool(everyone)
