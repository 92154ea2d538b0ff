"""One storage backend under sglang's cache controller, called for one batch at a time.

sglang loads `Nothing` from here by name, as it loads any backend that is not its own.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from disk import Files, Moved
from figures import Half
from memory import BATCH, names
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageExtraInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from memory import Memory

__all__ = ["Nothing", "Side"]

_GOES_ON = SimpleNamespace(request_id="bench", is_terminated=lambda: False)


class Side:
    """A controller of its own over the host pool of `memory`; pages are moved by its own choice.

    Bytes are compared outside the timed parts; a wrong one ends the run.

    Args:
        name: For messages.
        memory: Where pages come from and go to.
        folder: Of the store.
        storage: As `--hicache-storage-backend`.
        extra: As its extra config, parsed.
    """

    def __init__(
        self, name: str, memory: Memory, folder: str, storage: str, extra: dict[str, Any]
    ) -> None:
        self.name, self._memory = name, memory
        self.files, self.reads = Files(folder), Moved()
        self._controller = memory.engine.controller(storage, extra)

    @property
    def way(self) -> str:
        """Which of its calls the controller reads with."""
        way: str = self._controller.page_get_func.__name__
        return way

    def write(self, number: int) -> Half:
        """Stores batch `number`; what is left to write back then is written, not timed."""
        turn = number
        self._memory.fill(number, turn)
        indices, keys = self._memory.indices(turn), names(number)
        half, done = _timed(lambda: self._controller.page_set_func(keys, indices, _chain()))
        if not done:
            raise SystemExit(f"{self.name} did not store batch {number}")
        self.files.sync()  # or the other side would pay for this one's write-back
        return half

    def read(self, number: int, turn: int) -> Half:
        """Reads batch `number` into the pages of a turn, then compares every byte, not timed."""
        self._memory.poison(turn)
        indices, keys = self._memory.indices(turn), names(number)
        self.reads.start()
        half, done = _timed(
            lambda: self._controller.page_get_func(_GOES_ON, keys, indices, _chain())
        )
        self.reads.stop(self._memory.batch_bytes)
        wrong = self._memory.wrong(number, turn)
        if done != BATCH or wrong:
            raise SystemExit(
                f"{self.name} gave {done} of {BATCH} pages back, {wrong} with a wrong byte"
            )
        return half

    def call(self, turn: int) -> Half:
        """Reads as `read` does, but whatever bytes: for a store that gives none."""
        indices, keys = self._memory.indices(turn), names(0)
        return _timed(lambda: self._controller.page_get_func(_GOES_ON, keys, indices, _chain()))[0]

    def exists(self, number: int) -> Half:
        """Looks batch `number` up, as the controller's hit query does."""
        keys = names(number)
        half, found = _timed(lambda: self._controller.storage_backend.batch_exists(keys, _chain()))
        if found != BATCH:
            raise SystemExit(f"{self.name} knows {found} of {BATCH} pages that it stored")
        return half

    def close(self) -> None:
        self._controller.detach_storage_backend()


class Nothing(HiCacheStorage):
    """A store that says of each page that it was read: what is left is sglang's own work."""

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        pass

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor]:
        return list(target_locations)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor:
        return self.batch_get([key], [target_location])[0]

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return False


def _chain() -> HiCacheStorageExtraInfo:
    """What the controller says of the pages before a batch: there are none."""
    return HiCacheStorageExtraInfo(prefix_keys=[])


def _timed(call: Callable[[], Any]) -> tuple[Half, Any]:
    cpu, wall = time.process_time(), time.perf_counter()
    done = call()
    took = time.perf_counter() - wall
    return Half(took, time.process_time() - cpu), done
