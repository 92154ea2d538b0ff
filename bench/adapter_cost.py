"""What the SGLang adapter itself costs: ``.venv-sglang/bin/python bench/adapter_cost.py [--json]``.

`batch_get_v1` and `batch_set_v1` of 128 keys over a store that does nothing, as sglang's cache
controller calls them, on real host pools. What the store's wrappers take for the same keys and
segments is subtracted, and for `batch_set_v1` the bare checksums of the payloads: both are shown
apart. Microseconds are CPU time of the calling thread, medians over repeats, the lowest and highest
beside them.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(1, str(Path(__file__).parent / "common"))
import torch
from engine import Engine, Geometry, set_up
from overhead import BATCH, Figure, Null, chain_of, cost_a_page, show
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from xxhash import xxh3_64, xxh3_64_intdigest

from l3store import page, registry
from l3store.abc import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from l3store.config import StoreURL

PLACE = "bench-0123456789abcdef0123/kv/all"
PAGE_GOAL, SEGMENT_GOAL = 2.5, 0.2
TOKENS, ROW_BYTES = 16, 32
"""Small pages, so that checksums do not hide what is left."""
GEOMETRIES = (
    Geometry(True, "page_first", TOKENS, 16, ROW_BYTES),
    Geometry(False, "page_first", TOKENS, 16, ROW_BYTES),
    Geometry(False, "layer_first", TOKENS, 8, ROW_BYTES),
    Geometry(False, "layer_first", TOKENS, 32, ROW_BYTES),
    Geometry(False, "layer_first", TOKENS, 80, ROW_BYTES),
)


class Nothing(Null):
    """A store that answers at once that all went well."""

    def __init__(self) -> None:
        super().__init__(interruptible=True)
        # Else the wrapper `verify` would check pages that nobody filled.
        self.capabilities = Capabilities(interruptible=True, checks=True)

    @classmethod
    def from_url(cls, url: StoreURL) -> Nothing:
        return cls()


def announce(folder: str) -> None:
    """Makes ``nothing://`` known as any distribution makes its backend known: by entry point."""
    distribution = Path(folder) / "nothing-1.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: nothing\nVersion: 1\n")
    entry = f"[l3store.backends]\nnothing = {Nothing.__module__}:{Nothing.__qualname__}\n"
    (distribution / "entry_points.txt").write_text(entry)
    sys.path.append(folder)


def pieces_of(engine: Engine) -> list[tuple[memoryview, ...]]:
    """Returns the pieces of each page of the host pool: what the adapter must sum, too."""
    buffer = engine.host.kv_buffer
    start, whole = buffer.data_ptr(), memoryview(buffer.view(torch.uint8).reshape(-1).numpy())
    addresses, sizes = engine.host.get_page_buffer_meta(engine.indices(range(BATCH)))
    pieces = [
        whole[at - start : at - start + size] for at, size in zip(addresses, sizes, strict=True)
    ]
    count = engine.geometry.segments
    return [tuple(pieces[at : at + count]) for at in range(0, len(pieces), count)]


def costs() -> Iterator[Figure]:
    """Both calls with each number of segments."""
    at_two: dict[str, list[float]] = {}
    for geometry in GEOMETRIES:
        adapter = Adapter(geometry)
        for op in ("get", "set"):
            own, wrappers, sums = adapter.cost(op)
            what = f"batch_{op}_v1, {geometry.segments} segments"
            if geometry.segments <= 2:
                yield Figure(what, "us a page", own, PAGE_GOAL)
                at_two[op] = own
            else:
                yield Figure(what, "us a page", own)
                more = geometry.segments - 2
                further = [(value - median(at_two[op])) / more for value in own]
                yield Figure(f"  {more} further ones", "us a segment", further, SEGMENT_GOAL)
            yield Figure(f"  metered + breaker + deadline + verify, {op}", "us a page", wrappers)
            if sums:
                yield Figure("  bare xxh3 of the payload", "us a page", sums)
        adapter.close()


class Adapter:
    """The adapter as sglang's controller makes it, and what is to be subtracted."""

    def __init__(self, geometry: Geometry) -> None:
        # One more, as sglang sizes pools: layers at distances of a power of two share cache lines.
        engine = Engine(geometry, BATCH + 1)
        extra = {
            "backend_name": "l3store", "module_path": "l3store.adapters.sglang",
            "class_name": "L3StoreHiCache", "interface_v1": 1, "weights_revision": "bench",
            "url": "nothing://",
        }  # fmt: skip
        self._controller = engine.controller("dynamic", extra)
        self._calls = self._controller.storage_backend
        self._indices = engine.indices(range(BATCH))
        self._chain = chain_of(BATCH)
        self._hashes = [value.hex() for value in self._chain.hashes]
        self._payloads = pieces_of(engine)

    def cost(self, op: str) -> tuple[list[float], list[float], list[float]]:
        """Returns us a page, a value a repeat: the adapter's own, the wrappers', the checksums'."""
        extra = HiCacheStorageExtraInfo(prefix_keys=[])
        called = getattr(self._calls, f"batch_{op}_v1")
        keys = self._chain.keys(PLACE)
        pages = page.seal(PLACE, self._chain, self._payloads)
        moved = getattr(registry.open("nothing://"), f"page_{op}")
        writes = op == "set"

        def whole() -> Sequence[bool]:
            done: Sequence[bool] = called(self._hashes, self._indices, extra)
            return done

        def less() -> None:
            moved(keys, pages)
            if writes:
                self._sum()

        if whole() != [True] * BATCH:
            raise SystemExit(f"batch_{op}_v1 did not reach the store that does nothing")
        gc.freeze()  # what was made here is none of the adapter's: collections pass it over
        own = cost_a_page(whole, less)
        wrappers = cost_a_page(lambda: moved(keys, pages), lambda: None)
        return own, wrappers, cost_a_page(self._sum, lambda: None) if writes else []

    def _sum(self) -> None:
        """As `page.seal` must: in one go over one piece, as a stream over several."""
        if len(self._payloads[0]) == 1:
            for (piece,) in self._payloads:
                xxh3_64_intdigest(piece)
            return
        for pieces in self._payloads:
            state = xxh3_64()
            for piece in pieces:
                state.update(piece)
            state.intdigest()

    def close(self) -> None:
        self._controller.detach_storage_backend()


def main() -> None:
    """Prints the table, or one JSON object."""
    parser = argparse.ArgumentParser(description="What the SGLang adapter itself costs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    given = parser.parse_args()
    set_up()
    with tempfile.TemporaryDirectory() as folder:
        announce(folder)
        show(costs(), as_json=given.json)


if __name__ == "__main__":
    main()
