"""The ruler: the same runs by bare preadv and pwritev, O_DIRECT, on as many threads.

No index, no checksum, no header, no record: what the device and the system calls cost. The runs are
those that the store just moved, as its own calls of `os.preadv` and `os.pwritev` show them: merged
where they touch, then cut so that every thread gets the same number of bytes. Everything but the
calls is made ready before the clock starts.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from figures import Half

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["RawLoop", "Run", "Watch"]

_IOV_MAX = 1024


class Run(NamedTuple):
    """Neighbouring pages in one file."""

    path: str
    offset: int
    length: int


class Watch:
    """Sees the large reads and writes of the store in this process, by file and place.

    While `seeing`, each call of `os.preadv` and `os.pwritev` is noted: under a microsecond a call.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, int]] = []
        self._names: dict[int, str] = {}

    @contextmanager
    def seeing(self) -> Iterator[None]:
        self._seen.clear()
        before = os.preadv, os.pwritev
        os.preadv, os.pwritev = (self._noted(move) for move in before)
        try:
            yield
        finally:
            os.preadv, os.pwritev = before

    def _noted(self, move: Callable[..., int]) -> Callable[..., int]:
        seen = self._seen

        def moved(file: int, pieces: Sequence[memoryview], offset: int, flags: int = 0) -> int:
            length = move(file, pieces, offset, flags)
            seen.append((file, offset, length))
            return length

        return moved

    def runs(self, wanted: int) -> list[Run]:
        """Returns what was seen, merged; `wanted` bytes must have moved."""
        merged: list[Run] = []
        calls = sorted((self._path(file), at, length) for file, at, length in self._seen)
        for path, offset, length in calls:
            last = merged[-1] if merged else None
            if last and last.path == path and last.offset + last.length == offset:
                merged[-1] = last._replace(length=last.length + length)
            else:
                merged.append(Run(path, offset, length))
        total = sum(run.length for run in merged)
        if total != wanted:
            raise SystemExit(
                f"the store's preadv and pwritev moved {total} bytes, not the {wanted} of the "
                "batch: its runs cannot be repeated"
            )
        return merged

    def _path(self, file: int) -> str:
        return os.readlink(f"/proc/self/fd/{file}")


class RawLoop:
    """Repeats runs in the store's own files (reading) or in files like them (writing).

    Args:
        workers: Threads.
        mirror: Folder for files to write to; each is allocated when its first run comes.
        written: Whether those files are written once before they are used.
    """

    def __init__(self, workers: int, mirror: str, *, written: bool = False) -> None:
        self._workers, self._mirror, self._written = workers, mirror, written
        self._pool = ThreadPoolExecutor(workers, "raw")
        self._files: dict[tuple[str, bool], int] = {}
        wait([self._pool.submit(time.sleep, 0.01) for _ in range(workers)])  # threads are there

    def read(
        self,
        runs: Sequence[Run],
        pieces: Sequence[Sequence[memoryview]],
        before: Callable[[], object] = lambda: None,
    ) -> Half:
        return self._move(os.preadv, self._shares(runs, pieces, writing=False), before)

    def write(
        self,
        runs: Sequence[Run],
        pieces: Sequence[Sequence[memoryview]],
        before: Callable[[], object] = lambda: None,
    ) -> Half:
        return self._move(os.pwritev, self._shares(runs, pieces, writing=True), before)

    def close(self) -> None:
        self._pool.shutdown()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _move(
        self,
        move: Callable[[int, Sequence[memoryview], int], int],
        shares: Sequence[Sequence[tuple[int, Sequence[memoryview], int, int]]],
        before: Callable[[], object],
    ) -> Half:
        def work(share: Sequence[tuple[int, Sequence[memoryview], int, int]]) -> None:
            for file, part, offset, length in share:
                if move(file, part, offset) != length:
                    raise SystemExit("a raw call moved less than it was told to")

        before()
        cpu, wall = time.process_time(), time.perf_counter()
        futures = [self._pool.submit(work, share) for share in shares[1:]]
        work(shares[0])
        for future in futures:
            future.result()
        took = time.perf_counter() - wall
        return Half(took, time.process_time() - cpu)

    def _shares(
        self, runs: Sequence[Run], pieces: Sequence[Sequence[memoryview]], *, writing: bool
    ) -> list[list[tuple[int, Sequence[memoryview], int, int]]]:
        """Returns each thread's calls: (file, pieces, offset, bytes)."""
        size = sum([piece.nbytes for piece in pieces[0]])
        most = -(-len(pieces) // self._workers)  # pages a thread
        step = max(1, min(most, _IOV_MAX // len(pieces[0])))  # pages a call
        shares: list[list[tuple[int, Sequence[memoryview], int, int]]] = [[]]
        at = full = 0
        for run in runs:
            file, offset, left = self._file(run.path, writing), run.offset, run.length // size
            while left:
                if full == most:
                    shares.append([])
                    full = 0
                count = min(left, step, most - full)
                part = [piece for page in pieces[at : at + count] for piece in page]
                shares[-1].append((file, part, offset, count * size))
                at, full, left = at + count, full + count, left - count
                offset += count * size
        return shares

    def _file(self, path: str, writing: bool) -> int:
        if (path, writing) not in self._files:
            target = path
            if writing:
                target = os.path.join(self._mirror, os.path.basename(path))
                self._allocate(target, os.stat(path).st_size)
            flags = (os.O_RDWR if writing else os.O_RDONLY) | os.O_DIRECT | os.O_CLOEXEC
            self._files[path, writing] = os.open(target, flags)
        return self._files[path, writing]

    def _allocate(self, path: str, size: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            if self._written:
                zeros = bytes(1 << 20)
                for at in range(0, size, len(zeros)):
                    os.pwrite(file, zeros[: size - at], at)
                os.fdatasync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
