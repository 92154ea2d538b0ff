"""Opens or creates the folder of a store on a file system, and says clearly why it cannot.

``store.json`` at the top names the kind of store and its format.
"""

from __future__ import annotations

import os
import stat
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from l3store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FORMAT", "StoreFolder", "open_store_folder"]

FORMAT = 1
_MARKER = "store.json"
_OURS = {"meta", "pages", "tmp", "writers"}


class _Marker(msgspec.Struct, omit_defaults=True):
    format: int
    kind: str
    settings: dict[str, int] = {}
    """What was chosen when the store was made and holds for all who open it."""


class StoreFolder(NamedTuple):
    """An open store."""

    fd: int
    """The folder's descriptor; the caller closes it."""
    writable: bool
    settings: dict[str, int]
    """As they were chosen when the store was made."""


def open_store_folder(
    root: str, *, kind: str, create: bool, settings: Mapping[str, int] | None = None
) -> StoreFolder:
    """Opens the folder of a store, and makes it where it is missing.

    Blocks for a few file-system calls. Two processes may create one store at the same time: the
    settings of one of them hold for both.

    Args:
        root: Absolute path.
        kind: The scheme, as the marker says it.
        create: Make the folder and the marker where they are missing; needs the right to write.
        settings: For a new store.

    Raises:
        ConfigError: The path is relative or leads through a symbolic link, may not be used, or
            holds something else than a store of this kind and format.
    """
    _refuse_links(root)
    try:
        if create and not os.path.isdir(root):
            os.mkdir(root, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"store {root!r} cannot be created: {error.strerror}") from error
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"store {root!r} cannot be opened: {error.strerror}") from error
    try:
        writable = create and _writable(folder)
        kept = _check_marker(root, folder, _Marker(FORMAT, kind, dict(settings or {})), writable)
    except OSError as error:
        os.close(folder)
        raise ConfigError(f"store {root!r} cannot be opened: {error.strerror}") from error
    except BaseException:
        os.close(folder)
        raise
    return StoreFolder(folder, writable, kept)


def _refuse_links(root: str) -> None:
    if not root.strip("/"):
        raise ConfigError(f"store path {root!r} names no folder of its own, such as '/mnt/l3'")
    if not root.startswith("/"):
        raise ConfigError(f"store path {root!r} must be absolute; did you mean "
                          f"{os.path.abspath(root)!r}?")  # fmt: skip
    at = ""
    for part in root.strip("/").split("/"):
        if part in ("", ".", ".."):
            raise ConfigError(f"store path {root!r} is not plain; did you mean "
                              f"{os.path.normpath(root)!r}?")  # fmt: skip
        at += f"/{part}"
        try:
            link = stat.S_ISLNK(os.lstat(at).st_mode)
        except OSError:
            return  # missing or forbidden: opening it says so better
        if link:
            raise ConfigError(
                f"store path {root!r}: {at!r} is a symbolic link; did you mean "
                f"{os.path.realpath(root)!r}?"
            )


def _writable(folder: int) -> bool:
    # Permission bits alone do not tell root about a read-only mount.
    read_only_mount = os.fstatvfs(folder).f_flag & os.ST_RDONLY
    return not read_only_mount and os.access(".", os.W_OK | os.X_OK, dir_fd=folder)


def _check_marker(root: str, folder: int, wanted: _Marker, writable: bool) -> dict[str, int]:
    try:
        data = _read(folder)
    except FileNotFoundError:
        data = _made(root, folder, wanted, writable)
    except OSError as error:
        raise ConfigError(f"{root}/{_MARKER} cannot be read: {error.strerror}") from error
    try:
        marker = msgspec.json.decode(data, type=_Marker)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{root}/{_MARKER} does not describe a store: {error}") from error
    if marker.kind != wanted.kind:
        raise ConfigError(
            f"{root!r} is a store of kind {marker.kind!r}; did you mean {marker.kind}://{root}?"
        )
    if marker.format != FORMAT:
        raise ConfigError(
            f"{root!r} has format {marker.format}; this version reads format {FORMAT}"
        )
    return marker.settings


def _made(root: str, folder: int, wanted: _Marker, writable: bool) -> bytes:
    """Makes a store of an empty folder and returns its marker."""
    strangers = [name for name in os.listdir(folder) if not name.startswith(_MARKER)]
    if strangers:
        with suppress(FileNotFoundError):
            return _read(folder)  # another process has made the store, and used it, just now
        if all(name in _OURS or name.startswith("seg-") for name in strangers):
            marker = msgspec.json.encode(wanted).decode()
            raise ConfigError(
                f"{root!r} looks like a store whose {_MARKER} is lost; if it is one, "
                f"put this into it: {marker}"
            )
        raise ConfigError(
            f"{root!r} is not a store: it has no {_MARKER} but holds {min(strangers)!r}; "
            "name an empty or new folder"
        )
    if not writable:
        raise ConfigError(f"{root!r} is not a store: it is empty, and not to be written")
    _create(folder, wanted)
    return _read(folder)


def _read(folder: int) -> bytes:
    marker = os.open(_MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    with open(marker, "rb") as stream:
        return stream.read(4096)


def _create(folder: int, marker: _Marker) -> None:
    # No process number: two containers may have the same one, and share the folder.
    name = f"{_MARKER}.{uuid.uuid4().hex}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        with open(file, "wb") as stream:
            stream.write(msgspec.json.encode(marker))
            stream.flush()
            os.fsync(file)
        with suppress(FileExistsError):  # another process was first
            os.link(name, _MARKER, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.unlink(name, dir_fd=folder)
    for path in (".", ".."):  # a power cut must not take the names of a store that has promised
        with suppress(OSError):  # the parent may be nobody's to open
            named = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
            try:
                os.fsync(named)
            finally:
                os.close(named)
