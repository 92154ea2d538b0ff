"""Where a store's bytes lie, and the proof whether a read came from the device.

The proof is ``read_bytes`` of ``/proc/self/io``: what this process, all its threads, made the
kernel fetch from a block device or file server. A page that lies in the page cache adds nothing to
it, whatever anybody believes about caches. Bytes fetched by another process (a Redis or S3 server)
are not seen: such a store is "remote". Written bytes are the sectors written to the device of the
store (``/sys/dev/block``), whoever wrote them.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from l3store.mounts import file_system

if TYPE_CHECKING:
    from collections.abc import Iterator

    from l3store.abc import Capabilities
    from l3store.config import StoreURL

__all__ = ["DeviceBytes", "Medium", "cold_or_warm"]

_RAM = ("tmpfs", "ramfs", "hugetlbfs")
_SECTOR = 512


@dataclass(slots=True)
class DeviceBytes:
    """Bytes that a device moved; None: not known."""

    read: int | None = None
    written: int | None = None


@dataclass(frozen=True, slots=True)
class Medium:
    """Where the store's bytes lie."""

    kind: Literal["disk", "ram", "remote"]
    path: str = ""
    """Folder of the store's files; empty where it has none on this machine."""
    _statistics: Path | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: StoreURL, able: Capabilities) -> Medium:
        """Finds out by the URL's path, and the file system it lies on."""
        if url.path and not url.host and os.path.exists(url.path):
            device = os.stat(url.path).st_dev
            numbers = f"{os.major(device)}:{os.minor(device)}"
            if file_system(url.path) in _RAM:
                return cls("ram", url.path)
            statistics = Path("/sys/dev/block") / numbers / "stat"
            return cls("disk", url.path, statistics if statistics.exists() else None)
        return cls("remote" if able.shared or able.durable else "ram")

    @contextmanager
    def counted(self) -> Iterator[DeviceBytes]:
        """Counts the bytes that the device moves inside the block; None: unknown."""
        seen = DeviceBytes()
        if self.kind == "remote":
            yield seen
            return
        read, written = _read_by_this_process(), self._written()
        yield seen
        now_read, now_written = _read_by_this_process(), self._written()
        if read is not None and now_read is not None:
            seen.read = now_read - read
        if written is not None and now_written is not None:
            seen.written = now_written - written

    def _written(self) -> int | None:
        if self._statistics is None:
            return None
        return int(self._statistics.read_text(encoding="ascii").split()[6]) * _SECTOR

    def drop(self, namespace: str) -> None:
        """Writes the files of a namespace to the device and drops them from the page cache.

        Where the store keeps a folder of that name, only the files in it, else all of the store's.
        Blocks until the device has them.
        """
        if self.kind != "disk":
            return
        for path in _files(self.path, namespace):
            try:
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue  # removed meanwhile, or not ours to open
            try:
                os.fdatasync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError:
                pass  # a device or pipe; the proof tells whether anything stayed
            finally:
                os.close(file)


def cold_or_warm(device_bytes: int | None, payload_bytes: int) -> str:
    """Returns what the bytes read from the device say about the page cache before a read."""
    if device_bytes is None:
        return "unknown"
    share = device_bytes / payload_bytes if payload_bytes else 0.0
    return "cold" if share >= 0.95 else "warm" if share <= 0.01 else "mixed"


def _read_by_this_process() -> int | None:
    try:
        with open("/proc/self/io", encoding="ascii") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    except (OSError, StopIteration):
        return None


def _files(root: str, namespace: str) -> Iterator[str]:
    for top in (f"{root}/{namespace}", f"{root}/pages/{namespace}", root):
        if os.path.exists(top):
            break
    if os.path.isfile(top):
        yield top
    for folder, _, names in os.walk(top):
        for name in names:
            yield f"{folder}/{name}"
