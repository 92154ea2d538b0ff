"""The folder that is measured in, and proofs of what a device moved. The standard library alone."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["Files", "Moved", "file_system", "folder_bytes", "free_bytes"]


def file_system(path: str) -> str:
    """Returns the type of the file system that a folder lies on, as the kernel calls it."""
    path, found = os.path.realpath(path), ("", "")
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, mount, kind, *_ = line.split()
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(found[0]):  # a later mount lies over an earlier
            found = (mount, kind)
    return found[1]


def free_bytes(path: str) -> int:
    return shutil.disk_usage(path).free


def folder_bytes(path: str) -> int:
    """What the files of a folder take on the device."""
    return sum(
        os.lstat(os.path.join(folder, name)).st_blocks * 512
        for folder, _, names in os.walk(path)
        for name in names
    )


class Files:
    """The files below a folder: written back to the device, and out of the page cache."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._synced: set[int] = set()

    def sync(self) -> None:
        """Makes the device have all files; those that were synced before are not looked at."""
        self._each(drop=False)

    def drop(self) -> None:
        """Makes the device have all files, and the page cache none."""
        self._each(drop=True)

    def forget(self) -> None:
        """All files are new: inode numbers come again when files were removed."""
        self._synced.clear()

    def _each(self, *, drop: bool) -> None:
        found, folders = [], [self._folder]
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif drop or entry.inode() not in self._synced:
                        found.append(entry)
        with ThreadPoolExecutor(8) as pool:  # several at once share a journal commit
            list(pool.map(lambda entry: _sync(entry.path, drop), found))
        self._synced.update(entry.inode() for entry in found)


def _sync(path: str, drop: bool) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # removed meanwhile
    try:
        os.fdatasync(file)
        if drop:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


class Moved:
    """Counts what a process makes the kernel read from a device (``/proc/<pid>/io``).

    A page that comes from the page cache adds nothing to it.
    """

    def __init__(self, pid: int | str = "self") -> None:
        self._path = Path(f"/proc/{pid}/io")
        self.payload = self.read = 0
        self._at = 0

    def reset(self) -> None:
        self.payload = self.read = 0

    def start(self) -> None:
        self._at = self._now()

    def stop(self, payload: int) -> None:
        self.read += self._now() - self._at
        self.payload += payload

    def proof(self, wanted: str) -> str:
        """Returns what the counts say about the reads, loudly where it is not `wanted`.

        Args:
            wanted: "device" (every byte came from it) or "cache" (none did).
        """
        share = self.read / self.payload if self.payload else 0.0
        seen = "device" if share >= 0.95 else "cache" if share <= 0.01 else "mixed"
        text = f"{share:.0%} from the device"
        return text if seen == wanted else f"NOT {'COLD' if wanted == 'device' else 'WARM'}: {text}"

    def _now(self) -> int:
        for line in self._path.read_text().splitlines():
            name, value = line.split(":")
            if name == "read_bytes":
                return int(value)
        raise SystemExit(f"{self._path} tells no read_bytes: reads cannot be proven")
