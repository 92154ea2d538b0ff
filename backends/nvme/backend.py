"""The store: options, the calls of the contract, and what belongs together."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from l3store.abc import Capabilities, Check, PlaceUsage, Segments
from l3store.backends._folder import Folder
from l3store.backends._folder_backend import FolderBackend
from l3store.backends._store_folder import open_store_folder
from l3store.backends.nvme import integrity
from l3store.backends.nvme.catalog import Catalog
from l3store.backends.nvme.details import details
from l3store.backends.nvme.estate import Estate
from l3store.backends.nvme.filler import Filler
from l3store.backends.nvme.format import RECORD_BYTES, Geometry, record_holds
from l3store.backends.nvme.keeper import Chores, Keeper
from l3store.backends.nvme.members import Members
from l3store.backends.nvme.moving import stretches
from l3store.backends.nvme.options import NvmeOptions, check_sizes, sizes
from l3store.backends.nvme.reader import Reader
from l3store.backends.nvme.segment import Files
from l3store.calls import Gate, Workers
from l3store.config import StoreURL, load_options
from l3store.errors import BackendUnavailable, ConfigError, L3Error
from l3store.keys import check_keys, check_place, split_keys
from l3store.mounts import file_system
from l3store.page import HEADER_BYTES, check_batch, check_headers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["NvmeBackend"]

_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "afs", "ocfs2",
    "gfs2", "gpfs", "beegfs", "wekafs", "panfs", "virtiofs", "fuse.sshfs", "fuse.glusterfs",
    "fuse.s3fs", "fuse.juicefs", "fuse.ceph-fuse", "fuse.gcsfuse", "fuse.mountpoint-s3",
    "fuse.rclone", "fuse.goofys",
}  # fmt: skip


class NvmeBackend(FolderBackend):
    """Slabs on a local drive. All processes of a machine may use one store at once."""

    read_only_options: ClassVar = {"mode": "ro"}

    def __init__(self, root: str, options: NvmeOptions | None = None) -> None:
        self._options = options = options or NvmeOptions()
        self._file_system = file_system(root)
        if self._file_system in _NETWORK:
            raise ConfigError(
                f"nvme://{root} lies on {self._file_system}, which other machines share: its locks "
                f"and caches do not hold there; use file://{root}"
            )
        wanted = sizes(options)
        opened = open_store_folder(root, kind="nvme", create=options.mode == "rw", settings=wanted)
        self._folder, writable = Folder(opened.fd, root), opened.writable
        try:
            self._start(root, opened.settings, wanted, writable)
        except BaseException as error:
            if (members := getattr(self, "_members", None)) is not None:
                members.close()
            self._folder.close()
            if isinstance(error, OSError) and not isinstance(error, L3Error):
                raise BackendUnavailable(f"store {root!r} cannot be read: {error}") from error
            raise

    def _start(
        self, root: str, settings: Mapping[str, int], wanted: Mapping[str, int], writable: bool
    ) -> None:
        options = self._options
        size, self._segments = _agreed(root, settings, wanted, options)
        self._direct = options.io == "direct" and _takes_direct(self._folder.fd)
        files = self._files = Files(self._folder.fd, writable=writable, direct=self._direct)
        try:
            self._members = Members(self._folder.fd, writable=writable)
        except OSError as error:
            raise ConfigError(f"store {root!r}: its writers cannot be read: {error}") from error
        self._catalog = Catalog(files, self._members, size)
        durable = options.durability == "batch"
        self._estate = Estate(
            self._catalog, self._members, files, segments=self._segments, writers=options.writers,
            evict=options.evict, durable=durable,
        )  # fmt: skip
        self._pool = Workers(options.threads, "l3store-nvme")
        self._reader = Reader(self._catalog, self._estate, self._pool, options.threads)
        self._filler = Filler(
            self._catalog, self._estate, self._pool, options.threads, durable=durable
        )
        self._chores = Chores(self._catalog, self._estate, self._members, self._reader, options)
        largest = (size - 2 * 4096) // 4096 * 4096  # one slot, its superblock and its table
        self.capabilities = Capabilities(
            listing=True, delete=writable, headers=True, shared=True, durable=True, checks=True,
            read_only=not writable, late="wait", alignment=512 if self._direct else 1,
            max_page_bytes=largest + HEADER_BYTES,
        )  # fmt: skip
        self._gate = Gate(f"nvme store {root}")
        self._process = os.getpid()
        with self._catalog.lock:
            self._catalog.load_all()
        self._keeper = Keeper(self._chores) if writable else None
        if writable:
            self._folder.sweep()

    @classmethod
    def from_url(cls, url: StoreURL) -> NvmeBackend:
        """Opens the store in a folder, which is created where only itself is missing.

        Blocks for reading all slot tables: 1.6 to 2.5 s for a million pages.

        Raises:
            ConfigError: The path is relative, leads through a symbolic link, may not be used, lies
                on a network file system, or is no store of this kind, format and size; or an option
                is wrong.
        """
        if url.host:
            raise ConfigError(f"{url}: a path begins with a slash: nvme:///{url.host}{url.path}")
        return cls(url.path.rstrip("/") or "/", load_options(NvmeOptions, "nvme", url.options))

    # -- pages -----------------------------------------------------------------------------

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102 - as in Backend
        names = split_keys(keys)
        with self._call(), self._catalog.lock:
            self._catalog.refresh()
            found = self._catalog.found(names)
        return found.index(None) if None in found else len(found)

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        names = split_keys(keys)
        with self._call(), self._catalog.lock:
            self._catalog.refresh()
            return [at is not None for at in self._catalog.found(names)]

    def page_get(  # noqa: D102
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        lengths = check_batch(keys, into)
        self._check_lengths(lengths)
        with self._call():
            repair = not self.capabilities.read_only
            return self._reader.get(keys, into, check, lengths, repair=repair)

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        lengths = check_batch(keys, pages)
        self._check_lengths(lengths)
        with self._call():
            if self.capabilities.read_only:
                return [False] * len(keys)
            return self._filler.store(keys, pages, lengths)

    def delete(  # noqa: D102
        self, keys: Sequence[str], headers: Sequence[bytes | None] | None = None
    ) -> list[bool]:
        check_keys(keys)
        if not self.capabilities.delete:
            raise self._lacks("delete", "delete")
        expected = check_headers(keys, headers)
        with self._call(), self._catalog.lock:
            self._catalog.refresh()
            return [self._delete(key, header) for key, header in zip(keys, expected, strict=True)]

    def _delete(self, key: str, header: bytes | None) -> bool:
        """Removes all copies of a page; inside the store's lock."""
        removed = False
        while (location := self._catalog.found(split_keys((key,)), unproved=True)[0]) is not None:
            segment, slot = self._catalog.at(location)
            record = segment.read_records(slot, 1)
            if record_holds(record) and record[32:64].hex() != key[-64:]:  # filled anew meanwhile
                self._catalog.remove(segment, slot)
                continue
            if header is not None and record[:HEADER_BYTES] != header:
                return removed
            if self._estate.remove(segment, slot, record):
                removed = True
        return removed

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:  # noqa: D102
        names = split_keys(keys)
        found: list[bytes | None] = [None] * len(keys)
        with self._call():
            with self._catalog.lock:
                self._catalog.refresh()
                runs = stretches(self._catalog.found(names, unproved=True), self._catalog.segments)
            for run in runs:
                table = run.segment.read_records(run.first, len(run.pages))
                for at, i in enumerate(run.pages):
                    record = table[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]
                    if record_holds(record) and record[32:64].hex() == keys[i][-64:]:
                        found[i] = record[:HEADER_BYTES]
        return found

    def scan(self, place: str | None = None) -> Iterator[str]:  # noqa: D102
        if place is not None:
            check_place(place)
        with self._call(), self._catalog.lock:
            self._catalog.refresh()
            known = self._catalog.places
            names = sorted(known) if place is None else [place] if place in known else []
            pages = [(name, [*known[name].pages, *known[name].unproved]) for name in names]
        return (f"{name}/{value.hex()}" for name, values in pages for value in values)

    def usage(self) -> list[PlaceUsage]:  # noqa: D102
        found = []
        with self._call(), self._catalog.lock:
            self._catalog.refresh()
            for name, place in sorted(self._catalog.places.items()):
                count = len(place.pages) + len(place.unproved)
                slot = Geometry(self._catalog.segment_bytes, place.payload_bytes).slot_bytes
                if count:
                    found.append(PlaceUsage(
                        name, count, count * place.payload_bytes, count * (slot + RECORD_BYTES)
                    ))  # fmt: skip
        return found

    # -- health ----------------------------------------------------------------------------

    def health(self) -> None:  # noqa: D102
        with self._call():
            with self._catalog.lock:
                self._catalog.refresh()
            if self.capabilities.read_only:
                return
            self._check_writing()

    def check_integrity(self) -> list[str]:
        """Returns what does not agree between memory and files, one sentence each.

        Slots are free, live, retired or being filled; records are what the index says; files are
        as many and as large as they may be. Blocks all calls while it reads the slot tables.

        Raises:
            BackendUnavailable: The store cannot be read, or is closed.
        """
        with self._call():
            return integrity.problems(self._catalog, self._estate, self._folder.fd, self._segments)

    def details(self) -> dict[str, str | int | float]:  # noqa: D102 - as in Backend
        with self._call(), self._catalog.lock:
            self._catalog.refresh()
            return details(
                self._catalog, self._members, segments=self._segments,
                file_system=self._file_system, direct=self._direct,
            )  # fmt: skip

    def close(self) -> None:  # noqa: D102
        if os.getpid() != self._process:
            return  # all that matters was closed at the fork
        if not self._gate.shut(seconds=5.0):
            return
        if self._keeper is not None:
            self._keeper.close()
            self._chores.finish()
        self._pool.stop()
        with self._catalog.lock:
            self._members.close()
            self._files.close()
            self._folder.close()

    # -- ranks of one group ------------------------------------------------------------------

    def sure_pages(self, payload_bytes: int) -> int:
        """Returns how many pages of that payload this process is sure of room for.

        Its share of the segments (option `writers`), filled with such pages alone. Ranks of one
        group take the MIN over all of them as `limit_pages`: a pipeline stage with smaller pages
        would otherwise keep what the others have dropped, and no prefix is longer for it.
        """
        slots = Geometry(self._catalog.segment_bytes, payload_bytes).slots
        return self._estate.guaranteed * slots

    def limit_pages(self, place: str, pages: int) -> None:
        """From now on this process keeps at most so many pages of its own in a place.

        Raises:
            ValueError: `place` is outside the grammar, or `pages` is negative.
        """
        check_place(place)
        if pages < 0:
            raise ValueError(f"{pages} pages of {place}: at least 0")
        with self._catalog.lock:
            self._estate.limits[place] = pages

    # -- calls -----------------------------------------------------------------------------

    def _check_lengths(self, lengths: Mapping[str, int]) -> None:
        for length in lengths.values():
            largest = self.capabilities.max_page_bytes
            if length + HEADER_BYTES > largest:
                raise ValueError(
                    f"a page of {length + HEADER_BYTES} bytes, header included, does not fit into "
                    f"a segment of {self._catalog.segment_bytes}: at most {largest}, or more in a "
                    "new store with a larger option 'segment'"
                )

    @contextmanager
    def _call(self) -> Iterator[None]:
        if os.getpid() != self._process:  # its locks may be held, and its slots are its own
            raise BackendUnavailable(
                f"{self._folder.name} was opened before this process was forked: open it anew here"
            )
        with super()._call():
            yield


def _agreed(
    root: str, settings: Mapping[str, int], wanted: Mapping[str, int], options: NvmeOptions
) -> tuple[int, int]:
    """Returns (bytes of a segment, segments) of a store, which hold for all who open it."""
    try:
        size, segments = settings["segment_bytes"], settings["segments"]
    except KeyError as error:
        raise ConfigError(f"{root}/store.json lacks the setting {error}") from error
    check_sizes(size, segments, f"{root}/store.json")
    if options.segment and options.segment != size:
        raise ConfigError(
            f"option 'segment': {options.segment} bytes, but {root!r} was made with {size}; name "
            "that or none, or a new folder"
        )
    if options.writers > segments:
        raise ConfigError(
            f"option 'writers': {options.writers}, but {root!r} has {segments} segments, and each "
            f"writer needs one; the most is {segments}"
        )
    if options.capacity and options.capacity // size != segments:
        raise ConfigError(
            f"option 'capacity': {options.capacity} bytes, but {root!r} was made with "
            f"{size * segments}; to change it, close the store everywhere and write "
            f'"segments": {options.capacity // size} into its store.json'
        )
    return size, segments


def _takes_direct(folder: int) -> bool:
    """Returns whether the file system has O_DIRECT."""
    flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
    try:
        os.close(os.open("store.json", flags, dir_fd=folder))
    except OSError:
        return False
    return True
