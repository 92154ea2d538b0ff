"""The processes of one group size: started, told what to do, and gone at the end."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rank import Bout, Proof, Seen, be_rank

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from typing import Self

__all__ = ["Group"]

_PATIENCE_S = 120.0
_LEAVE_S = 10.0


class Group(AbstractContextManager["Group"]):
    """So many ranks, each in a process that is forked from this one and dies with it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        fork = multiprocessing.get_context("fork")  # torch takes seconds to import
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(ranks):
            ours, theirs = fork.Pipe()
            process = fork.Process(
                target=be_rank, args=(theirs, os.getpid(), rank, ranks), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        self._pipes[0].send(0)
        port = self._answer(0)
        for pipe in self._pipes[1:]:
            pipe.send(port)
        self._answers()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                self._ask(None)
        finally:
            for process in self._processes:
                process.join(_LEAVE_S if exc[0] is None else 0)
                if process.is_alive():
                    process.kill()
                    process.join()

    def bout(self, told: Bout) -> list[Seen]:
        """Has one group step; returns what each rank saw, by rank."""
        return self._ask(told)

    def drain(self, kind: str) -> list[Proof]:
        """Has all tickets of a group end.

        Raises:
            SystemExit: The effects of the ranks were not the same.
        """
        proofs: list[Proof] = self._ask(kind)
        for rank, proof in enumerate(proofs):
            if (proof.digest, proof.ended) != (proofs[0].digest, proofs[0].ended):
                raise SystemExit(f"{kind}: rank {rank} had other effects than rank 0")
        return proofs

    def _ask(self, told: object) -> Any:
        for pipe in self._pipes:
            pipe.send(told)
        return self._answers()

    def _answers(self) -> list[Any]:
        return [self._answer(rank) for rank in range(self.ranks)]

    def _answer(self, rank: int) -> Any:
        for _ in range(int(_PATIENCE_S)):
            try:
                if self._pipes[rank].poll(1.0):
                    return self._pipes[rank].recv()
            except (EOFError, ConnectionError):
                break
            if any(process.exitcode for process in self._processes):
                break
        raise SystemExit(f"a process of {self.ranks} has ended, or hangs; what is wrong is above")
