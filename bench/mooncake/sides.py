"""What is measured side by side: each stores, reads and looks for one batch, and is timed.

All of them work on the buffers of one `Memory`, on one client of the library and on the same owner
of memory. Batches are known by number, from 0 up to the turns of that memory. What was read is
compared, every byte of it, outside the timed part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rounds import Side, StoreSide, timed

from l3store import registry
from l3store.backends.mooncake.memory import spread

if TYPE_CHECKING:
    from figures import Half
    from pages import Memory

    from l3store.backends.mooncake import MooncakeBackend

__all__ = ["Bare", "Ours"]

_PATIENCE = "60s"
"""Deadline of the wrapped store: the machine may be busy, and a late call would be an error."""


class Ours(StoreSide):
    """Our store: bare, or inside the wrappers of `registry.open`, which verify each page."""

    def __init__(self, name: str, memory: Memory, url: str, *, late: str = "") -> None:
        given = f"{url}&deadline={_PATIENCE}&late={late}" if late else url
        store = registry.open(given, raw=not late)
        super().__init__(name, memory, _place(name, memory), store)

    def remove(self, number: int) -> None:
        """Removes batch `number`: a put of what is there moves nothing."""
        self.store.delete(self._batch(number).keys)


class Bare(Side):
    """Mooncake's own calls on the client of `ours`, names and addresses made before."""

    def __init__(self, name: str, memory: Memory, ours: Ours) -> None:
        super().__init__(name, memory, _place(name, memory))
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


def _place(name: str, memory: Memory) -> str:
    """Each side has pages of its own, all in one store."""
    return f"bench-mooncake/kv/{name}{memory.shape.page_bytes}"
