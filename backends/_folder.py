"""Files below one folder: whole or absent under their name, and never outside the folder.

Paths are relative to the folder and made of parts that `l3store.keys` has checked.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote

from l3store.abc import META_MAX_BYTES
from l3store.backends._vectors import move_all
from l3store.errors import BackendUnavailable
from l3store.keys import check_meta_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Folder"]

Result = TypeVar("Result")

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a planted FIFO must not block
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_STALE_SECONDS = 3600.0
_RETRIES = 8  # of a rename whose folder another process has just removed


class Folder:
    """The files below the open folder `fd`, for messages called `name`. Thread-safe.

    Every method blocks for its system calls and raises bare `OSError`; `BackendUnavailable` where a
    link or a file stands in the place of a folder.
    """

    def __init__(self, fd: int, name: str) -> None:
        self.name, self.fd = name, fd
        self._nonce = uuid.uuid4().hex
        self._serial = itertools.count()
        self._real: set[str] = set()  # folders that are known to be folders, not links

    def close(self) -> None:
        """Closes the folder; the caller sees to it that no call is running."""
        os.close(self.fd)

    def stat(self, path: str) -> os.stat_result | None:
        """Returns what stands at `path` (a link is not followed), or None."""
        self._refuse_links(path)
        return self._lstat(path)

    def _lstat(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open(self, path: str) -> int:
        """Returns a descriptor for reading what stands at `path`; a link is refused."""
        self._refuse_links(path)
        return os.open(path, _READ, dir_fd=self.fd)

    @contextmanager
    def opened(self, path: str) -> Iterator[tuple[int, os.stat_result]]:
        """Opens a file for reading and gives (descriptor, its stat)."""
        file = self.open(path)
        try:
            yield file, os.fstat(file)
        finally:
            os.close(file)

    def read(self, path: str, limit: int) -> bytes | None:
        """Returns at most `limit` bytes of a small file, None where there is none."""
        try:
            with self.opened(path) as (file, _):
                return os.read(file, limit)
        except FileNotFoundError:
            return None

    def publish(
        self,
        path: str,
        pieces: Sequence[memoryview],
        *,
        replace: bool = True,
        sync: bool = False,
    ) -> None:
        """Makes `path` a file of these bytes, all at once.

        Args:
            path: Its place.
            pieces: Its bytes.
            replace: Whether it may stand already.
            sync: Bytes first, then the name, also after a power cut: for small files that nothing
                else could make again.

        Raises:
            FileExistsError: It stands already, and not `replace`.
        """
        temporary = self.temporary(pieces, sync=sync)
        place = os.rename if replace else os.link
        try:
            self._with_folders(
                path, lambda: place(temporary, path, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            )
        except BaseException:
            self._discard(temporary)
            raise
        if not replace:
            self._discard(temporary)

    def temporary(self, pieces: Sequence[memoryview], *, sync: bool = False) -> str:
        """Writes a file below ``tmp`` and returns its path."""
        name = f"tmp/{self._nonce}-{next(self._serial)}"
        file = self._with_folders(name, lambda: os.open(name, _CREATE, 0o600, dir_fd=self.fd))
        try:
            wanted = sum([piece.nbytes for piece in pieces])
            if move_all(os.pwritev, file, pieces) != wanted:
                raise OSError(errno.ENOSPC, "the file system took only part of a file")
            if sync:
                os.fsync(file)
        except BaseException:
            self._discard(name)
            raise
        finally:
            os.close(file)
        return name

    def remove(self, path: str, found: os.stat_result | None = None) -> bool:
        """Removes what stands at `path`: with `found` only if it still is that very file.

        Between looking and removing another process may replace it. Then its good page is lost:
        a miss, and nothing wrong is kept.
        """
        now = self.stat(path)
        if now is None or (found is not None and _identity(now) != _identity(found)):
            return False
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(now.st_mode):
                os.rmdir(path, dir_fd=self.fd)
            else:
                os.unlink(path, dir_fd=self.fd)
            return True
        return False

    def names(self, folder: str) -> list[str]:
        """Returns the names in a folder, sorted; none where it is missing or no folder.

        Where the store's own folder at the top is none, nothing is known: that is an error.
        """
        try:
            self._refuse_links(folder)
            opened = os.open(folder, _READ | os.O_DIRECTORY, dir_fd=self.fd)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:  # also for a link
            top = folder.partition("/")[0]
            found = self._lstat(top)
            if found is not None and not stat.S_ISDIR(found.st_mode):
                raise BackendUnavailable(
                    f"{self.name}/{top} is not a folder of this store"
                ) from error
            return []
        try:
            return sorted(os.listdir(opened))
        finally:
            os.close(opened)

    def sweep(self) -> None:
        """Removes temporary files that a process left behind when it was killed.

        What cannot be looked at or removed stays: it keeps nobody from using the store.
        """
        names: list[str] = []
        with suppress(OSError):
            names = self.names("tmp")
        for name in names:
            with suppress(OSError):
                found = self.stat(f"tmp/{name}")
                if found is not None and time.time() - found.st_mtime > _STALE_SECONDS:
                    self.remove(f"tmp/{name}", found)

    # -- descriptors: small files below meta -------------------------------------------------

    def put_meta(self, name: str, data: bytes) -> None:
        """As `Backend.put_meta`."""
        self.publish(self._meta(name), [memoryview(data)], sync=True)

    def get_meta(self, name: str) -> bytes | None:
        """As `Backend.get_meta`."""
        return self.read(self._meta(name), META_MAX_BYTES)

    def list_meta(self) -> list[str]:
        """As `Backend.list_meta`; foreign files are passed over."""
        found = []
        for name in map(unquote, self.names("meta")):
            with suppress(ValueError):
                found.append(check_meta_name(name))
        return sorted(found)

    @staticmethod
    def _meta(name: str) -> str:
        return f"meta/{quote(name, safe='')}"

    # -- folders ---------------------------------------------------------------------------

    def _with_folders(self, path: str, call: Callable[[], Result]) -> Result:
        """Calls, and where a folder of `path` is missing makes it and calls again."""
        self._refuse_links(path)
        for _ in range(_RETRIES):
            with suppress(FileNotFoundError):
                return call()
            at = ""
            for part in path.split("/")[:-1]:
                at = f"{at}/{part}" if at else part
                with suppress(FileExistsError, FileNotFoundError):
                    os.mkdir(at, 0o700, dir_fd=self.fd)
            self._refuse_links(path)
        return call()

    def _refuse_links(self, path: str) -> None:
        """Keeps a link that was planted inside the store from leading out of it."""
        folder = path.rpartition("/")[0]
        if folder in self._real:
            return
        at = ""
        for part in folder.split("/"):
            at = f"{at}/{part}" if at else part
            found = self._lstat(at)
            if found is None:
                return
            if not stat.S_ISDIR(found.st_mode):
                raise BackendUnavailable(f"{self.name}/{at} is not a folder of this store")
        self._real.add(folder)

    def _discard(self, path: str) -> None:
        with suppress(OSError):
            os.unlink(path, dir_fd=self.fd)


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_dev, found.st_ino, found.st_ctime_ns
