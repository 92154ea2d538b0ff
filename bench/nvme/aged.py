"""A store whose capacity a trace has turned over three times."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ours import Store
from pages import Batch, Memory, Shape

from l3store.keys import Chain
from l3store.replay import read_trace, replay, synthetic_trace
from l3store.replay.engine import page_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from figures import Half
    from ours import Setting

    from l3store.replay import Request

__all__ = ["Aged"]

_TURNOVERS = 3
_REQUESTS = 100  # a step, after which the pages stored are counted


def _open_trace() -> tuple[str, Iterator[Request], Callable[[], None]]:
    """Returns a name, requests, and how to close: the conversation trace, else a synthetic one.

    It lies beside the checkout, or where L3STORE_TRACE_DIR says.
    """
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
    path = Path(os.environ.get("L3STORE_TRACE_DIR", beside)) / "mooncake_conversation.jsonl"
    if not path.is_file():
        return "synthetic trace", synthetic_trace(1, 12_000), lambda: None
    lines = open(path, "rb")  # noqa: SIM115 - closed with the store
    return path.stem, read_trace(lines), lines.close


class Aged:
    """The store, batches of what the trace left in it, and batches that the trace adds."""

    def __init__(self, setting: Setting, shape: Shape, memory: Memory) -> None:
        self.store = Store.new(setting, shape, memory, "ours")
        self._asked: list[Chain] = []
        name, self._trace, self.close = _open_trace()
        pages, stored, requests = setting.capacity // shape.page_bytes, 0, 0
        while stored < _TURNOVERS * pages:
            part = list(islice(self._trace, _REQUESTS))
            if not part:
                raise SystemExit("the trace is too short for three turnovers of this capacity")
            seen = replay(self.store.backend, part, page_bytes=shape.page_bytes)
            if seen.mismatched_pages:
                raise SystemExit(f"{seen.mismatched_pages} pages came back wrong")
            stored, requests = stored + seen.set_pages, requests + len(part)
            self._asked += map(_chain, part)
        (usage,) = self.store.backend.usage()
        self.store.place = usage.place
        self.story = f"{name}: {requests} requests stored {stored} pages, {usage.pages} are there"
        self._added = self._more()

    def batches(self) -> list[Batch]:
        """Returns batches of the prefixes that are there, the newest request first.

        A page is in one batch only.
        """
        shape, place, taken = self.store.shape, self.store.place, set[bytes]()
        found: list[Chain] = []
        for chain in reversed(self._asked):
            stored = self.store.backend.batch_exists(chain.keys(place))
            known = next((i for i in range(stored) if chain.hashes[i] not in taken), stored)
            if known < stored:
                found.append(chain[known:stored])
                taken.update(chain.hashes[:stored])
        return list(_cut(iter(found), shape.batch, place))

    def write_next(self, turn: int) -> Half:
        """Stores what the next requests of the trace miss, one batch; older pages leave."""
        batch = next(self._added, None)
        if batch is None:
            raise SystemExit("the trace is too short for so many pairs; use --quick")
        return self.store.write(batch, turn)[0]

    def _more(self) -> Iterator[Batch]:
        return _cut(self._missing(), self.store.shape.batch, self.store.place)

    def _missing(self) -> Iterator[Chain]:
        waiting: set[bytes] = set()  # the newest pages given out, which may not be stored yet
        for request in self._trace:
            chain = _chain(request)
            at = self.store.backend.batch_exists(chain.keys(self.store.place))
            while at < len(chain) and chain.hashes[at] in waiting:
                at += 1
            if at < len(chain):
                if len(waiting) > 16 * self.store.shape.batch:
                    waiting.clear()
                waiting.update(chain.hashes[at:])
                yield chain[at:]


def _chain(request: Request) -> Chain:
    return Chain(page_hashes(0, request.hash_ids))


def _cut(chains: Iterator[Chain], size: int, place: str) -> Iterator[Batch]:
    """Yields batches of exactly `size` pages; what is left at the end is left out."""
    parts, room = list[Chain](), size
    for whole in chains:
        chain = whole
        while len(chain) >= room:
            yield Batch.of([*parts, chain[:room]], place)
            chain, parts, room = chain[room:], [], size
        if len(chain):
            parts.append(chain)
            room -= len(chain)
