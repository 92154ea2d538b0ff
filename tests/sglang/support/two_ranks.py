"""Two processes that agree as two ranks of sglang do: real gloo, the controller's own groups.

A test holds a `Pair` and tells both ranks the same thing; `rank_process` is what each of them runs.
"""

from __future__ import annotations

import multiprocessing.connection
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

__all__ = ["TOPOLOGIES", "Pair", "Recall", "Topology"]

SECONDS = 60.0
"""The longest that a rank may take for anything; then it is killed."""


class Topology(NamedTuple):
    """What the two ranks are to each other."""

    axis: str
    """``tp`` or ``pp``."""
    mla: bool = False

    def shard(self, rank: int) -> str:
        """Returns the shard that a rank reads: MLA pages are the same on all TP ranks."""
        return "all" if self.mla and self.axis == "tp" else f"{self.axis[0].upper()}{rank}of2"


TOPOLOGIES = {"PP2": Topology("pp"), "TP2": Topology("tp"), "TP2-MLA": Topology("tp", mla=True)}


class Recall(NamedTuple):
    """What came of one prefetch on one rank."""

    loaded: int
    """Tokens that came from L3, as sglang tells it."""
    back: int
    """Tokens of the prompt that L1 holds after load-back."""
    wrong: list[str]
    """Layers that hold other bytes than what was stored."""
    lost: int
    """Tokens of L2 that neither the tree holds nor anybody can get any more."""


class Pair:
    """Two ranks, each in a process. What takes longer than a minute ends both: `TimeoutError`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="l3s")
        # Forked from one process that has sglang imported, and no thread: that takes 10 s of CPU.
        fork = multiprocessing.get_context("forkserver")
        fork.set_forkserver_preload(["rank_process"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(2):
            ours, theirs = fork.Pipe()
            process = fork.Process(
                target=_serve, args=(rank, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def do(self, name: str, *args: Any, each: Sequence[Any] = ((), ())) -> list[Any]:
        """Returns what both ranks answer; `each` is what only one of them is told.

        Raises:
            RuntimeError: A rank raised something; the message is its traceback.
            TimeoutError: A rank did not answer.
            EOFError: A rank ended. After any of these both processes are killed.
        """
        for pipe, more in zip(self._pipes, each, strict=True):
            pipe.send((name, *args, *more))
        answers: dict[Connection, Any] = {}
        end = time.monotonic() + SECONDS
        try:
            while waiting := [pipe for pipe in self._pipes if pipe not in answers]:
                ready = multiprocessing.connection.wait(waiting, end - time.monotonic())
                if not ready:
                    hanging = [rank for rank in range(2) if self._pipes[rank] in waiting]
                    raise TimeoutError(f"ranks {hanging} hang in {name}")
                for pipe in ready:
                    good, answers[pipe] = pipe.recv()
                    if not good:
                        raise RuntimeError(answers[pipe])
        except BaseException:
            self.kill()  # the other rank may wait for this one
            raise
        return [answers[pipe] for pipe in self._pipes]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, folder: str, pipe: Connection) -> None:
    import rank_process  # which imports sglang, and this process need not

    rank_process.serve(rank, folder, pipe, SECONDS / 2)
