"""``file:///mnt/l3``: one file a page, on a local or shared file system. The teaching example.

    store.json                                              kind and format
    meta/<name, percent-encoded>                            descriptors
    pages/<namespace>/<pool>/<shard>/payload_bytes          the length of the place's pages
    pages/<namespace>/<pool>/<shard>/<2 hash digits>/<hash> a page
    tmp/                                                    files on their way to a rename

A page's file holds its segments one after the other. It is written below ``tmp`` and renamed, so
its name never shows less than the whole page, whatever is killed. Pages are not
synced: after a power cut one may be short or empty, which its length and checksum tell. The small
files are.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from l3store.abc import Capabilities, Check, PlaceUsage, Segments
from l3store.backends._folder import Folder
from l3store.backends._folder_backend import FULL, FolderBackend
from l3store.backends._lengths import Lengths, parse_length
from l3store.backends._store_folder import open_store_folder
from l3store.backends._vectors import move_all
from l3store.calls import Gate, Workers
from l3store.config import StoreURL, load_options
from l3store.errors import BackendUnavailable, CapacityError, ConfigError
from l3store.keys import check_keys, check_place
from l3store.page import HEADER_BYTES, check_batch, check_headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["FileBackend", "FileOptions"]

_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)  # a link, folder, FIFO, device


class FileOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``file://``."""

    workers: int = 4
    """Threads that read and write files."""
    mode: Literal["rw", "ro"] = "rw"
    """``ro`` creates and changes nothing."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"option 'workers' must be positive, not {self.workers}")


class FileBackend(FolderBackend):
    """One file a page. Several processes and machines may use one store at once."""

    read_only_options: ClassVar = {"mode": "ro"}

    def __init__(self, root: str, options: FileOptions | None = None) -> None:
        options = options or FileOptions()
        opened = open_store_folder(root, kind="file", create=options.mode == "rw")
        self._folder, writable = Folder(opened.fd, root), opened.writable
        self.capabilities = Capabilities(
            listing=True, delete=writable, headers=True, shared=True, durable=True, checks=True,
            read_only=not writable,
        )  # fmt: skip
        self._gate = Gate(f"file store {root}")
        self._workers, self._pool = options.workers, Workers(options.workers, "l3store-file")
        self._lengths = Lengths(self._read_length, self._claim_length)
        if writable:
            self._folder.sweep()

    @classmethod
    def from_url(cls, url: StoreURL) -> FileBackend:
        """Opens the store in a folder, which is created where only itself is missing.

        Raises:
            ConfigError: The path is relative, leads through a symbolic link, may not be used, or is
                no store of this kind and format; or an option is wrong.
        """
        if url.host:
            raise ConfigError(f"{url}: a path begins with a slash: file:///{url.host}{url.path}")
        return cls(url.path.rstrip("/") or "/", load_options(FileOptions, "file", url.options))

    # -- pages -----------------------------------------------------------------------------

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102 - as in Backend
        check_keys(keys)
        with self._call():
            return next((i for i, key in enumerate(keys) if not self._stored(key)), len(keys))

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        check_keys(keys)
        with self._call():
            return [self._stored(key) for key in keys]

    def page_get(  # noqa: D102
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        lengths = check_batch(keys, into)
        with self._call():
            self._lengths.check_all(lengths)
            return self._spread(len(keys), lambda i: self._read(i, keys[i], into[i], check))

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        lengths = check_batch(keys, pages)
        with self._call():
            if self.capabilities.read_only:
                return [False] * len(keys)
            try:
                self._lengths.check_all(lengths, claim=True)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                done = [False] * len(keys)
            else:
                done = self._spread(len(keys), lambda i: self._write(keys[i], pages[i]))
            if keys and not any(done):
                raise CapacityError(f"{self._folder.name}: no space left for pages", done=done)
            return done

    def delete(  # noqa: D102
        self, keys: Sequence[str], headers: Sequence[bytes | None] | None = None
    ) -> list[bool]:
        check_keys(keys)
        if not self.capabilities.delete:
            raise self._lacks("delete", "delete")
        expected = check_headers(keys, headers)
        with self._call():
            return [self._remove(*pair) for pair in zip(keys, expected, strict=True)]

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:  # noqa: D102
        check_keys(keys)
        with self._call():
            return [self._header(key) for key in keys]

    def open_page(self, key: str) -> int | None:
        """Returns a descriptor of the file that holds a page, for tools that walk many.

        It reads as the page's segments one after the other; the caller closes it. None: there is
        no file of that name.
        """
        check_keys((key,))
        with self._call():
            try:
                return self._folder.open(_path(key))
            except OSError as error:
                if error.errno not in (errno.ENOENT, *_NO_FILE):
                    raise
                return None

    def scan(self, place: str | None = None) -> Iterator[str]:  # noqa: D102
        with self._call():
            places = self._places() if place is None else [check_place(place)]
        for at in places:
            for fan in self._names(f"pages/{at}"):
                for name in self._names(f"pages/{at}/{fan}"):
                    key = f"{at}/{name}"
                    with suppress(ValueError):  # a foreign file
                        check_keys((key,))
                        if name[:2] == fan:
                            yield key

    def usage(self) -> list[PlaceUsage]:  # noqa: D102
        found = []
        for place in self._places():
            pages, length = sum(1 for _ in self.scan(place)), self._lengths.known(place) or 0
            found.append(PlaceUsage(place, pages, pages * length, pages * (length + HEADER_BYTES)))
        return [usage for usage in found if usage.pages]

    # -- health ----------------------------------------------------------------------------

    def health(self) -> None:  # noqa: D102
        with self._call():
            if self.capabilities.read_only:
                self._folder.names("pages")
                return
            self._check_writing()

    def close(self) -> None:  # noqa: D102
        if self._gate.shut(seconds=5.0):
            self._pool.stop()
            self._folder.close()

    # -- one page --------------------------------------------------------------------------

    def _stored(self, key: str) -> bool:
        found = self._folder.stat(_path(key))
        return found is not None and stat.S_ISREG(found.st_mode)

    def _read(self, i: int, key: str, segments: Segments, check: Check | None) -> bool:
        path = _path(key)
        size = sum([piece.nbytes for piece in segments])
        try:
            with self._folder.opened(path) as (file, found):
                # All pages of the place have the caller's length: another one is damage.
                whole = found.st_size == size and move_all(os.preadv, file, segments) == size
        except FileNotFoundError:
            return False
        except OSError as error:
            link = self._folder.stat(path)
            if error.errno not in _NO_FILE or link is None:
                raise
            found, whole = link, False
        if whole and (check is None or check(i, segments)):
            return True
        if not self.capabilities.read_only:
            self._folder.remove(path, found)
        return False

    def _write(self, key: str, page: Segments) -> bool:
        path = _path(key)
        found = self._folder.stat(path)
        size = sum([piece.nbytes for piece in page])
        if found is not None and stat.S_ISREG(found.st_mode) and found.st_size == size:
            return True  # any whole page of a key is as good as another
        try:
            self._folder.publish(path, page)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
        return True

    def _header(self, key: str) -> bytes | None:
        try:
            with self._folder.opened(_path(key)) as (file, _):
                return os.pread(file, HEADER_BYTES, 0)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *_NO_FILE):
                raise
            return None

    def _remove(self, key: str, header: bytes | None) -> bool:
        path = _path(key)
        if header is None:
            return self._folder.remove(path)
        try:
            with self._folder.opened(path) as (file, found):
                same = os.pread(file, HEADER_BYTES, 0) == header
        except FileNotFoundError:
            return False
        return same and self._folder.remove(path, found)

    # -- places ----------------------------------------------------------------------------

    def _read_length(self, place: str) -> int | None:
        path = f"pages/{place}/payload_bytes"
        text = self._folder.read(path, 64)
        return None if text is None else parse_length(text, f"{self._folder.name}/{path}")

    def _claim_length(self, place: str, length: int) -> None:
        path, text = f"pages/{place}/payload_bytes", memoryview(b"%d" % length)
        with suppress(FileExistsError):  # another process was first
            self._folder.publish(path, [text], replace=False, sync=True)

    def _places(self) -> list[str]:
        found = []
        for namespace in self._names("pages"):
            for pool in self._names(f"pages/{namespace}"):
                for shard in self._names(f"pages/{namespace}/{pool}"):
                    with suppress(ValueError):  # a foreign folder
                        found.append(check_place(f"{namespace}/{pool}/{shard}"))
        return found

    def _names(self, folder: str) -> list[str]:
        with self._call():
            return self._folder.names(folder)

    # -- calls -----------------------------------------------------------------------------

    def _spread(self, count: int, one: Callable[[int], bool]) -> list[bool]:
        """Runs `one` for each page on the workers; after an error, tells what was done."""
        done = [False] * count

        def run(part: range) -> None:
            for i in part:
                done[i] = one(i)

        step = -(-count // self._workers) or 1
        parts = [range(at, min(at + step, count)) for at in range(0, count, step)]
        futures = [self._pool.submit(partial(run, part)) for part in parts[1:]]
        errors = [_error_of(lambda: run(parts[0]))] if parts else []
        errors += [future.exception() for future in futures]  # waits: buffers are the caller's
        for error in errors:
            if isinstance(error, OSError):
                raise BackendUnavailable(
                    f"{self._folder.name}: {error.strerror or error}", done=done
                ) from error
            if error is not None:
                raise error
        return done


def _error_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def _path(key: str) -> str:
    place, _, digits = key.rpartition("/")
    return f"pages/{place}/{digits[:2]}/{digits}"
