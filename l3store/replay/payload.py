"""Pages whose bytes tell which page they are, made and compared at memory speed.

A page is a stretch of random bytes that begins at a place the page hash chooses; each 4 KiB of it
begin with the hash and the block's number. So another page, a shifted or swapped block, a stale or
an unwritten one differ, and any flipped bit does.
"""

from __future__ import annotations

import hashlib
import mmap
import random

__all__ = ["Payloads", "aligned_buffer"]

_BLOCK = 4096
_NOISE = 1 << 20


class Payloads:
    """Makes and checks the payloads of pages of one size. Not thread-safe."""

    def __init__(self, page_bytes: int, seed: int) -> None:
        self._size = page_bytes
        # Noise, longer than a page by the range of the starting place. It may repeat: the stamps
        # tell blocks apart, and randbytes makes at most 256 MiB.
        length = page_bytes + _BLOCK
        noise = random.Random(seed).randbytes(min(length, _NOISE))
        self._noise = memoryview(noise * -(-length // len(noise)))
        self._scratch = memoryview(bytearray(page_bytes))
        self._poison = bytes(b ^ 0xFF for b in hashlib.sha256(b"poison").digest()) * (
            -(-page_bytes // 32)
        )

    def write(self, page_hash: bytes, into: memoryview) -> None:
        """Fills `into` with the payload of a page."""
        start = int.from_bytes(page_hash[:2], "little") % _BLOCK
        into[:] = self._noise[start : start + self._size]
        for number, at in enumerate(range(0, self._size, _BLOCK)):
            stamp = page_hash + number.to_bytes(8, "little")
            end = min(at + len(stamp), self._size)
            into[at:end] = stamp[: end - at]

    def matches(self, page_hash: bytes, data: memoryview) -> bool:
        """Returns whether `data` is the payload of a page, every byte of it."""
        self.write(page_hash, self._scratch)
        # Compared as bytes: a memoryview is compared item by item, some 30 times slower.
        return bytes(self._scratch) == bytes(data)

    def poison(self, into: memoryview) -> None:
        """Fills `into` with what no page is, so that a page nobody wrote cannot pass."""
        into[:] = self._poison[: self._size]


def aligned_buffer(count: int, size: int) -> list[memoryview]:
    """Returns `count` buffers of `size` bytes, the first page-aligned, in one stretch of memory."""
    view = memoryview(mmap.mmap(-1, max(count * size, 1)))
    return [view[i * size : (i + 1) * size] for i in range(count)]
