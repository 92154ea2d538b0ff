"""Who writes to a store: one journal file a writer, and the lock on it.

    writers/roster           one line a writer that was ever made: growth tells of a new one
    writers/<id>.journal     its journal; who holds the flock(2) on it is the writer

A process takes a writer when it first has something to write or to tell, and holds it until it
ends, however it ends. A lock that is free belongs to a process that is gone: its segments stay
readable, and whoever needs a writer, or room, takes it over with all that belongs to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import uuid
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from l3store.backends.nvme.journal import Journal
from l3store.backends.nvme.locks import held

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from l3store.backends.nvme.journal import Entry

__all__ = ["Members", "Writer"]

_FOLDER = "writers"
_ROSTER = f"{_FOLDER}/roster"
_SUFFIX = ".journal"
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOCK_SECONDS = 2.0


class Writer:
    """A writer that this process holds."""

    def __init__(self, identity: bytes, file: int) -> None:
        self.identity = identity
        self.journal = Journal(file)
        self._file = file

    def damaged(self) -> bool:
        """Returns whether somebody removed or overwrote its journal."""
        return not os.fstat(self._file).st_nlink or not self.journal.whole()

    def mend(self, root: int) -> None:
        """Makes its journal whole again, for those who come from now on."""
        if not os.fstat(self._file).st_nlink:
            flags = os.O_RDWR | os.O_CREAT | _OPEN
            file = os.open(_path(self.identity), flags, 0o600, dir_fd=root)
            try:
                if not _flocked(file):
                    return  # somebody thinks that its process is gone
                os.dup2(file, self._file, inheritable=False)
            finally:
                os.close(file)
        self.journal.make(self.journal.seen)

    def close(self) -> None:
        """Gives the writer up."""
        os.close(self._file)


class Members:
    """The writers of a store: those of this process, and the journals of all others.

    Guarded by the store's lock. Blocks for small system calls.
    """

    def __init__(self, folder: int, *, writable: bool) -> None:
        self._root, self._writable = folder, writable
        self.mine: dict[bytes, Writer] = {}
        self.peers: dict[bytes, Journal] = {}
        self._files: dict[bytes, int] = {}  # of peers
        self._seen = 0  # bytes of the roster
        if writable:
            with suppress(FileExistsError):
                os.mkdir(_FOLDER, 0o700, dir_fd=folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND if writable else os.O_RDONLY
        self._roster = os.open(_ROSTER, flags | _OPEN, 0o600, dir_fd=folder)
        _all.add(self)
        try:
            self._meet()
            for journal in self.peers.values():
                journal.seen = journal.head()  # what was before stands in the tables
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives up all writers and closes all files."""
        _all.discard(self)
        for writer in self.mine.values():
            writer.close()
        for file in (*self._files.values(), self._roster):
            os.close(file)

    def news(self) -> Iterator[tuple[bytes, list[Entry] | None]]:
        """Yields (writer, its new entries) for each peer that has some; None: some are lost.

        Raises:
            OSError: The roster cannot be read.
        """
        os.pread(self._roster, 1, 0)  # a drive that is gone says so here
        found = os.fstat(self._roster)
        if found.st_size != self._seen or not found.st_nlink:
            self._meet()
        for peer, journal in list(self.peers.items()):
            if (entries := journal.news()) != []:
                yield peer, entries

    def _meet(self) -> None:
        """Opens the journals of writers that are not known yet, or have a new one."""
        if not os.fstat(self._roster).st_nlink:
            self._renew_roster()
        size = os.fstat(self._roster).st_size
        for identity in self._known():
            before = self._files.get(identity)
            if identity in self.mine or (before is not None and os.fstat(before).st_nlink):
                continue
            file = self._opened(identity)
            if file is None:
                continue
            journal = Journal(file)
            try:
                whole = journal.whole()
            except BaseException:
                os.close(file)
                raise
            if not whole:  # it is being made, or its maker was killed over it
                os.close(file)
                continue
            if before is not None:
                journal.seen = self.peers[identity].seen
                os.close(before)
            self.peers[identity], self._files[identity] = journal, file
        self._seen = size

    def _renew_roster(self) -> None:
        """Somebody removed the roster: uses the one that is there now."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND if self._writable else os.O_RDONLY
        with suppress(FileNotFoundError):
            file = os.open(_ROSTER, flags | _OPEN, 0o600, dir_fd=self._root)
            os.dup2(file, self._roster, inheritable=False)
            os.close(file)

    def _known(self) -> list[bytes]:
        folder = os.open(_FOLDER, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=self._root)
        try:
            names = os.listdir(folder)
        finally:
            os.close(folder)
        found = []
        for name in sorted(names):
            digits = name.removesuffix(_SUFFIX)
            if digits != name and len(digits) == 32:
                with suppress(ValueError):
                    found.append(bytes.fromhex(digits))
        return found

    def _opened(self, identity: bytes) -> int | None:
        """Opens a journal for reading; None where a file of that name is gone, or is none."""
        try:
            file = os.open(_path(identity), os.O_RDONLY | _OPEN, dir_fd=self._root)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise
            return None
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        return None

    def mend(self) -> None:
        """Makes own journals whole again that somebody damaged, and tells of them anew.

        Raises:
            OSError: The store cannot be written.
            BackendUnavailable: Another process holds the lock for too long.
        """
        for identity, writer in self.mine.items():
            if writer.damaged():
                with self.locked():
                    writer.mend(self._root)
                    self._enrol(identity)

    # -- taking and testing writers: inside `locked` -----------------------------------------

    def take(self, identity: bytes) -> Writer | None:
        """Takes over a writer whose process is gone; None where it is not.

        The caller has taken in its journal's last entries, or reads its tables afterwards.
        """
        file = os.open(_path(identity), os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=self._root)
        writer = Writer(identity, file)
        try:
            if not _flocked(file):
                writer.close()
                return None
            if not writer.journal.whole():
                writer.journal.make()
            if identity.hex().encode("ascii") not in self._roster_lines():  # killed before that
                self._enrol(identity)
            writer.journal.seen = writer.journal.head()
        except BaseException:
            writer.close()
            raise
        self.mine[identity] = writer
        if self.peers.pop(identity, None) is not None:
            os.close(self._files.pop(identity))
        return writer

    def make(self) -> Writer:
        """Makes a new writer.

        Raises:
            OSError: No space, or the store cannot be written.
        """
        identity = uuid.uuid4().bytes
        file = os.open(
            _path(identity), os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._root
        )
        writer = Writer(identity, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            writer.journal.make()
            self._enrol(identity)  # or nobody would hear of it
        except BaseException:
            writer.close()
            with suppress(OSError):
                os.unlink(_path(identity), dir_fd=self._root)
            raise
        self.mine[identity] = writer
        return writer

    def _enrol(self, identity: bytes) -> None:
        os.write(self._roster, identity.hex().encode("ascii") + b"\n")

    def _roster_lines(self) -> list[bytes]:
        return os.pread(self._roster, os.fstat(self._roster).st_size, 0).split()

    def orphans(self, before: Iterable[bytes] = ()) -> list[bytes]:
        """Returns the writers whose process is gone.

        Args:
            before: Writers of segments: they are gone, too, if their journals were lost.
        """
        known = self._known()
        found = [
            one
            for one in dict.fromkeys(before)
            if one not in known and one not in self.mine and not self._holds_removed(one)
        ]
        for identity in known:
            if identity in self.mine:
                continue
            file = self._opened(identity)
            if file is not None:
                try:
                    if _flocked(file):
                        found.append(identity)
                finally:
                    os.close(file)
        return found

    def _holds_removed(self, identity: bytes) -> bool:
        """Returns whether a process holds a journal that was removed since we opened it."""
        file = self._files.get(identity)
        if file is None or not _flocked(file):
            return file is not None
        fcntl.flock(file, fcntl.LOCK_UN)
        return False

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other processes from making or giving up segments and writers meanwhile.

        Raises:
            BackendUnavailable: Another process holds the lock for too long.
        """
        return held(
            lambda: _flocked(self._roster),
            lambda: fcntl.flock(self._roster, fcntl.LOCK_UN),
            _LOCK_SECONDS,
            f"another process holds the lock of {_ROSTER}",
        )


_all: weakref.WeakSet[Members] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked child holds no locks: they would outlive the process that they stand for."""
    for members in list(_all):
        members.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _path(identity: bytes) -> str:
    return f"{_FOLDER}/{identity.hex()}{_SUFFIX}"


def _flocked(file: int) -> bool:
    """Takes a file's lock if nobody has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return False
    return True
