"""What is measured side by side: each stores, reads and looks for one batch, and is timed.

All of them work on the buffers of one `Memory`, on one client of the library and on the same owner
of memory. Batches are known by number, from 0 up to the turns of that memory. What was read is
compared, every byte of it, outside the timed part.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import rounds
from figures import Half

from l3store import registry
from l3store.backends.mooncake.memory import spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from pages import Memory

    from l3store.backends.mooncake import MooncakeBackend

__all__ = ["Bare", "Ours", "Side"]

_PATIENCE = "60s"
"""Deadline of the wrapped store: the machine may be busy, and a late call would be an error."""


class Side(rounds.Side):
    """One way to move pages. Each has pages of its own, all in one store."""

    def __init__(self, name: str, memory: Memory) -> None:
        super().__init__(name, memory, f"bench-mooncake/kv/{name}{memory.shape.page_bytes}")

    def exists(self, number: int) -> Half:
        """Looks for batch `number`, which is there."""
        raise NotImplementedError

    def remove(self, number: int) -> None:
        """Removes batch `number`: a put of what is there moves nothing."""
        raise NotImplementedError


class Ours(Side):
    """Our store: bare, or inside the wrappers of `registry.open`, which verify each page."""

    def __init__(self, name: str, memory: Memory, url: str, *, late: str = "") -> None:
        super().__init__(name, memory)
        given = f"{url}&deadline={_PATIENCE}&late={late}" if late else url
        self.store = registry.open(given, raw=not late)

    def put(self, number: int) -> Half:
        keys = self._batch(number).keys
        pages = self._memory.sealed(self._batch(number), number, self._place)
        half, done = timed(lambda: self.store.page_set(keys, pages))
        if not all(done):
            raise SystemExit(f"{self.name} did not store batch {number}")
        return half

    def get(self, number: int) -> Half:
        keys, room = self._batch(number).keys, self._memory.room(number)
        half, done = timed(lambda: self.store.page_get(keys, room))
        self._compared(number, done)
        return half

    def exists(self, number: int) -> Half:
        keys = self._batch(number).keys
        half, found = timed(lambda: self.store.batch_exists(keys))
        if found != len(keys):
            raise SystemExit(f"{self.name} finds {found} of {len(keys)} pages")
        return half

    def remove(self, number: int) -> None:
        self.store.delete(self._batch(number).keys)

    def close(self) -> None:
        self.store.close()


class Bare(Side):
    """Mooncake's own calls on the client of `ours`, names and addresses made before."""

    def __init__(self, name: str, memory: Memory, ours: Ours) -> None:
        super().__init__(name, memory)
        client = cast("MooncakeBackend", ours.store)._client
        self.library: Any = client._store

    def put(self, number: int) -> Half:
        batch = self._batch(number)
        pages = self._memory.sealed(batch, number, self._place)
        pointers, sizes, _ = spread(pages)
        half, codes = timed(
            lambda: self.library.batch_put_from_multi_buffers(batch.keys, pointers, sizes)
        )
        if any(codes):
            raise SystemExit(f"{self.name} did not store batch {number}: {codes}")
        return half

    def get(self, number: int) -> Half:
        keys, room = self._batch(number).keys, self._memory.room(number)
        pointers, sizes, _ = spread(room)
        half, codes = timed(
            lambda: self.library.batch_get_into_multi_buffers(keys, pointers, sizes)
        )
        self._compared(number, [code == sum(size) for code, size in zip(codes, sizes, strict=True)])
        return half

    def exists(self, number: int) -> Half:
        keys = self._batch(number).keys
        half, codes = timed(lambda: self.library.batch_is_exist(keys))
        if codes != [1] * len(keys):
            raise SystemExit(f"{self.name} does not find batch {number}")
        return half

    def remove(self, number: int) -> None:
        self.library.batch_remove(self._batch(number).keys, True)


def timed(call: Callable[[], Any]) -> tuple[Half, Any]:
    """Returns what a call took, and gave."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = call()
    return Half(time.perf_counter() - wall, time.process_time() - cpu), found
