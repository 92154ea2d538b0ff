"""Our store as it is measured: opened in a folder of the run, called for one batch at a time."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disk import Moved
from figures import Half

from l3store import page, registry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pages import Batch, Memory, Shape
    from raw import Run, Watch

    from l3store.abc import Backend, Segments

__all__ = ["PLACE", "Setting", "Store", "batches_that_fit"]

PLACE = "bench-nvme/kv/all"
SEGMENT = 128 << 20
"""Of a store of 1 GiB that would be 16 MiB; stores of 64 GiB and more have 1 GiB. With 128 MiB a
segment is begun every few batches, not with each."""


@dataclass(frozen=True)
class Setting:
    """What one run is told on its command line."""

    folder: str
    venvs: str
    pairs: int
    capacity: int
    workers: int
    stacked: bool
    """Inside the wrappers of `registry.open`; else the bare backend, which checks all the same."""
    options: tuple[str, ...] = ()
    """More options of the URL."""

    def new_folder(self, name: str) -> str:
        """Returns an empty folder; one of that name that was there before is gone."""
        path = os.path.join(self.folder, name)
        shutil.rmtree(path, ignore_errors=True)
        os.mkdir(path)
        return path

    def url(self, folder: str, capacity: int, *options: str) -> str:
        given = (f"capacity={capacity}", f"segment={min(SEGMENT, capacity // 8)}",
                 f"workers={self.workers}", *self.options, *options)  # fmt: skip
        return f"nvme://{folder}?{'&'.join(given)}"


@dataclass
class Store:
    """An open store of pages of one shape.

    All byte comparisons happen outside the timed parts; a wrong byte ends the run.
    """

    setting: Setting
    shape: Shape
    memory: Memory
    backend: Backend
    folder: str
    place: str = PLACE
    verify: bool = True
    reads: Moved = field(default_factory=Moved)
    lasting: bool = False
    """Others use the folder: it stays when this store is closed."""

    @classmethod
    def new(
        cls, setting: Setting, shape: Shape, memory: Memory, name: str, *options: str,
        capacity: int | None = None,
    ) -> Store:  # fmt: skip
        """Opens an empty store in folder `name` of the run."""
        folder = setting.new_folder(name)
        url = setting.url(folder, capacity or setting.capacity, *options)
        backend = registry.open(url, raw=not setting.stacked)
        return cls(setting, shape, memory, backend, folder)

    def write(
        self,
        batch: Batch,
        turn: int,
        watch: Watch | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> tuple[Half, list[Run]]:
        """Stores a batch; with `watch` also returns the runs that it became.

        `before` is called when all is ready for the clock.
        """
        pages = self.memory.sealed(batch, turn, self.place)
        before()
        if watch is None:
            return self._set(batch, pages), []
        with watch.seeing():
            half = self._set(batch, pages)
        return half, watch.runs(self.shape.batch_bytes)

    def _set(self, batch: Batch, pages: Sequence[Segments]) -> Half:
        cpu, wall = time.process_time(), time.perf_counter()
        done = self.backend.page_set(batch.keys, pages)
        took = time.perf_counter() - wall
        half = Half(took, time.process_time() - cpu)
        if not all(done):
            raise SystemExit(f"the store did not take {done.count(False)} pages of a batch")
        return half

    def read(self, batch: Batch, turn: int, before: Callable[[], object] = lambda: None) -> Half:
        """Reads a batch with its checksums verified, then compares every byte, not timed."""
        into = self.memory.room(turn)
        before()
        self.reads.start()
        cpu, wall = time.process_time(), time.perf_counter()
        check = page.opener(batch.keys) if self.verify and not self.setting.stacked else None
        done = self.backend.page_get(batch.keys, into, check)
        took = time.perf_counter() - wall
        half = Half(took, time.process_time() - cpu)
        self.reads.stop(self.shape.batch_bytes)
        wrong = self.memory.wrong(batch, turn, done)
        if wrong:
            raise SystemExit(
                f"{wrong} of {len(done)} pages came back wrong or not at all "
                f"({done.count(False)} not at all)"
            )
        return half

    def exists(self, batch: Batch) -> Half:
        """Looks a stored batch up."""
        cpu, wall = time.process_time(), time.perf_counter()
        found = self.backend.batch_exists(batch.keys)
        took = time.perf_counter() - wall
        half = Half(took, time.process_time() - cpu)
        if found != len(batch.keys):
            raise SystemExit("the store does not know a batch that it stored")
        return half

    def runs(self, batch: Batch, watch: Watch) -> list[Run]:
        """Reads a batch, not to time it, and returns where its pages lie."""
        with watch.seeing():
            self.read(batch, 0)
        return watch.runs(self.shape.batch_bytes)

    def close(self) -> None:
        self.backend.close()
        if not self.lasting:
            shutil.rmtree(self.folder, ignore_errors=True)


def batches_that_fit(capacity: int, shape: Shape) -> int:
    """How many batches a store takes before it evicts, with a little to spare."""
    segment = min(SEGMENT, capacity // 8)
    slots = segment * 99 // 100 // shape.page_bytes
    return capacity // segment * slots // shape.batch
