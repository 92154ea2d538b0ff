"""The ruler: memcpy of the same bytes, page by page, between buffers larger than the CPU caches."""

from __future__ import annotations

import time
from pathlib import Path

from l3store.replay.payload import aligned_buffer

__all__ = ["Ruler", "pool_bytes"]

_UNKNOWN_CACHE = 64 << 20
_MOST = 512 << 20


class Ruler:
    """Copies pages from one buffer to another, each in one memcpy, going round in both.

    Args:
        pages: How many pages each buffer holds; of one size.
        page_bytes: Bytes of a page.
    """

    def __init__(self, pages: int, page_bytes: int) -> None:
        self._from = aligned_buffer(pages, page_bytes)
        self._to = aligned_buffer(pages, page_bytes)
        self._at = 0
        filler = bytes(range(1, 129)) * (-(-page_bytes // 128))
        for source, target in zip(self._from, self._to, strict=True):
            # Untouched memory is one shared page of zeros, which would come from the cache.
            source[:] = target[:] = filler[:page_bytes]

    def copy(self, count: int) -> float:
        """Copies the next `count` pages and returns the seconds it took. Holds the GIL."""
        start, pages = self._at, len(self._from)
        chosen = [(start + i) % pages for i in range(count)]
        self._at = (start + count) % pages
        source, target = self._from, self._to
        begin = time.perf_counter()
        for i in chosen:
            target[i][:] = source[i]
        return time.perf_counter() - begin


def pool_bytes() -> int:
    """Returns a size that no CPU cache holds: a quarter more than the largest, at most 512 MiB."""
    sizes = [_UNKNOWN_CACHE]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        units = {"K": 1 << 10, "M": 1 << 20}
        if text[:-1].isdigit() and text[-1:] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return min(max(sizes) * 5 // 4, _MOST)
