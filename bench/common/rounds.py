"""Rounds in which all sides move the same batches, one after the other, and their figures."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from figures import Figure, Half, Pairs
from pages import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pages import Memory, Shape

    from l3store.abc import Backend

__all__ = ["Side", "StoreSide", "rounds", "speeds", "timed", "times_of"]


class Side:
    """One way to move pages. Batches are known by number, from 0 up to `count`.

    Args:
        name: In the table.
        memory: The buffers that all sides use.
        place: Of its pages; "" where others name them.
    """

    def __init__(self, name: str, memory: Memory, place: str = "") -> None:
        self.name, self._memory, self._place = name, memory, place
        self.count = memory.turns
        """Batches that it stores."""

    def put(self, number: int) -> Half:
        """Stores batch `number`."""
        raise NotImplementedError

    def get(self, number: int) -> Half:
        """Reads batch `number`."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends it."""

    def _batch(self, number: int) -> Batch:
        return Batch.numbered(number, self._memory.shape, self._place)

    def _compared(self, number: int, done: Sequence[bool]) -> None:
        if wrong := self._memory.wrong(self._batch(number), number, done):
            raise SystemExit(f"{self.name}: {wrong} pages of batch {number} are not what was put")


class StoreSide(Side):
    """Our store: bare, or inside the wrappers of `registry.open`, which verify each page."""

    def __init__(self, name: str, memory: Memory, place: str, store: Backend) -> None:
        super().__init__(name, memory, place)
        self.store = store

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
        """Looks for a batch that is there."""
        keys = self._batch(number).keys
        return self._found(keys, len(keys))

    def close(self) -> None:
        self.store.close()

    def _found(self, keys: Sequence[str], there: int) -> Half:
        half, found = timed(lambda: self.store.batch_exists(keys))
        if found != there:
            raise SystemExit(f"{self.name} finds {found} of {len(keys)} pages")
        return half


AnySide = TypeVar("AnySide", bound=Side)
Found = TypeVar("Found")


def timed(call: Callable[[], Found]) -> tuple[Half, Found]:
    """Returns what a call took, and gave."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = call()
    took = time.perf_counter() - wall
    return Half(took, time.process_time() - cpu), found


def times_of(shape: Shape, least: int) -> int:
    """Returns the batches a round, so that a side moves at least so many bytes in one."""
    return max(1, -(-least // shape.batch_bytes))


def rounds(
    sides: Sequence[AnySide],
    what: str,
    count: int,
    times: int,
    before_put: Callable[[AnySide, int], None] = lambda side, number: None,
) -> dict[str, list[Half]]:
    """Returns the halves of each side, one a round; batch by batch another side is first.

    Args:
        sides: Who takes part; unless they put, each stores its batches first.
        what: The method that is called with a batch's number.
        count: Rounds; one more warms up and is not counted.
        times: Batches a round.
        before_put: Runs before each put, outside its time: what is there already is not sent.
    """
    found: dict[str, list[Half]] = {side.name: [] for side in sides}
    if what != "put":
        for side in sides:
            for number in range(side.count):
                side.put(number)
    for number in range(-1, count):
        halves: dict[str, list[Half]] = {side.name: [] for side in sides}
        for i in range(number * times, (number + 1) * times):
            first = i % len(sides)
            for side in (*sides[first:], *sides[:first]):
                if what == "put":
                    before_put(side, i % side.count)
                halves[side.name].append(getattr(side, what)(i % side.count))
        if number >= 0:
            for name, seen in halves.items():
                found[name].append(_typical(seen))
    return found


def _typical(halves: Sequence[Half]) -> Half:
    """The median time of a round's batches, as others use the machine; and what CPU they took."""
    cpu = sum(one.cpu for one in halves) / len(halves)
    return Half(median(one.wall for one in halves), cpu)


def speeds(
    what: str, seen: Mapping[str, list[Half]], shape: Shape, ours: Side, other: Side,
    least: float | None,
) -> Figure:  # fmt: skip
    """Returns the figure of two sides' bytes a second, with the CPU of both."""
    pairs = Pairs(shape.batch_bytes, seen[ours.name], seen[other.name])
    cpu = f"CPU s/GB {pairs.cpu(pairs.ours):.3f}, {other.name} {pairs.cpu(pairs.other):.3f}"
    return Figure.speeds(what, pairs, other.name, least=least, note=cpu)
