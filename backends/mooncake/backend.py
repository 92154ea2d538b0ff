"""The backend: the contract, on a client of Mooncake's library."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakSet

from l3store.abc import Backend, Capabilities, Check, PlaceUsage, Segments
from l3store.backends.mooncake.admin import Admin
from l3store.backends.mooncake.client import Settings, connect, give_back
from l3store.backends.mooncake.life import Life
from l3store.backends.mooncake.options import ADMIN_PORT, from_url, parse_address
from l3store.backends.mooncake.pages import Pages
from l3store.calls import Gate
from l3store.errors import BackendTimeout, BackendUnavailable, CapacityError, ConfigError
from l3store.keys import check_keys, check_meta_name, check_place
from l3store.page import HEADER_BYTES, check_batch, check_headers, check_meta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from l3store.backends.mooncake.options import Address, MooncakeOptions
    from l3store.config import StoreURL

__all__ = ["MooncakeBackend"]

_CLOSING = 5.0  # seconds that `close` waits for running calls


class MooncakeBackend(Backend):
    """Pages in the memory of Mooncake's owners, found through its master.

    Several processes and machines may use one store at once, each with a connection of its own; all
    stores of one process that reach a master alike share one client of the library.
    """

    read_only_options: ClassVar = {"mode": "ro"}

    def __init__(self, master: Address, options: MooncakeOptions) -> None:
        self._options = options
        self._writable = options.mode == "rw"
        self._admin: Admin | None = None
        if options.admin:
            where = options.admin
            if where.isascii() and where.isdigit():
                where = str(master._replace(port=int(where)))
            address = parse_address(where, "option 'admin'", ADMIN_PORT)
            self._admin = Admin(address, options.timeout)
            self._admin.check()  # before the library is set up, which a frozen master would hang
        self.capabilities = Capabilities(
            listing=self._admin is not None, delete=self._writable, headers=True,
            registration=True, shared=True, durable=not options.segment,
            read_only=not self._writable, late="staged",
        )  # fmt: skip
        self._gate = Gate(f"Mooncake store {options.prefix} at {master}")
        self._lock = Lock()
        self._buffers: list[int] = []
        self._client = connect(Settings.of(master, options))
        unregistered = options.unregistered
        if unregistered == "auto":
            unregistered = "direct" if options.protocol == "tcp" else "copy"
        sessions = options.calls == "sessions" or (
            options.calls == "auto" and options.protocol == "tcp" and not options.segment
        )
        self._pages = Pages(
            self._client, options.prefix, unregistered, self._client.sessions if sessions else None
        )
        try:
            self._life = Life(self._client, options.prefix)
            if self._writable:
                self._life.mark()
            self._check_admin()
        except CapacityError as error:
            give_back(self._client, idle=True)
            raise BackendUnavailable(str(error)) from error
        except BaseException:
            give_back(self._client, idle=True)
            raise
        _open.add(self)

    @classmethod
    def from_url(cls, url: StoreURL) -> MooncakeBackend:
        """Opens the store that a master keeps under a prefix, and makes it where there is none.

        Blocks until the master has answered.

        Raises:
            ConfigError: An option is wrong, the library refuses it, the admin port is another
                master's, or what stands under the prefix is no store of this kind and format.
            BackendUnavailable: No master answers, or it has no memory even for a small object.
        """
        return cls(*from_url(url))

    @classmethod
    def check_url(cls, url: StoreURL) -> bool:  # noqa: D102 - as in Backend
        from_url(url)
        return True

    # -- pages -----------------------------------------------------------------------------

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102 - as in Backend
        found = self.exists_each(keys)
        return next((i for i, there in enumerate(found) if not there), len(found))

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        check_keys(keys)
        with self._call():
            return self._pages.exist(keys)

    def page_get(  # noqa: D102
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        lengths = check_batch(keys, into)
        if not keys:
            return []
        with self._call() as life:
            life.lengths.check_all(lengths)
            done, damaged, failed = self._pages.get(keys, into)
            for i in damaged:
                self._judge(life, keys[i], into[i], done)
            if failed:
                raise self._client.failed(failed, "reading pages", done)
            return done

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        lengths = check_batch(keys, pages)
        if not keys:
            return []
        with self._call() as life:
            if not self._writable:
                return [False] * len(keys)
            try:
                life.mark()
                life.lengths.check_all(lengths, claim=True)
            except CapacityError as error:
                error.done = [False] * len(keys)
                raise self._without_memory(error) from error
            done, failed = self._pages.put(keys, pages)
            if failed:
                raise self._client.failed(failed, "writing pages", done)
            if not any(done):
                raise self._without_memory(
                    CapacityError(
                        f"Mooncake at {self._client.settings.master} has no room for a page: "
                        "it is full, or no process lends memory",
                        done=done,
                    )
                )
            return done

    def delete(  # noqa: D102
        self, keys: Sequence[str], headers: Sequence[bytes | None] | None = None
    ) -> list[bool]:
        check_keys(keys)
        if not self._writable:
            raise self._lacks("delete", "delete")
        expected = check_headers(keys, headers)
        with self._call():
            asked = [i for i, header in enumerate(expected) if header is not None]
            found = dict(zip(asked, self._pages.headers([keys[i] for i in asked]), strict=True))
            done = [False] * len(keys)
            chosen = [i for i in range(len(keys)) if found.get(i) == expected[i]]
            try:
                removed = self._pages.remove([keys[i] for i in chosen])
            except (BackendTimeout, BackendUnavailable) as error:
                for i, gone in zip(chosen, error.done, strict=False):
                    done[i] = gone
                error.done = done
                raise
            for i, gone in zip(chosen, removed, strict=True):
                done[i] = gone
            return done

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:  # noqa: D102
        check_keys(keys)
        with self._call():
            return self._pages.headers(keys)

    def register_buffer(self, buffer: memoryview) -> None:
        """Registers host memory with the library, so that RDMA devices reach it.

        Over tcp it changes nothing that can be measured. See option `unregistered` for what
        happens to other memory.

        Raises:
            ConfigError: The library refuses it: it overlaps registered memory, or exceeds what may
                be locked.
            BackendUnavailable: The store is closed, or this process was forked.
        """
        with self._gate:
            self._client.check_here()
            start = self._client.registered.add(buffer)
            with self._lock:
                self._buffers.append(start)

    # -- descriptors -----------------------------------------------------------------------

    def put_meta(self, name: str, data: bytes) -> None:  # noqa: D102
        check_meta(name, data)
        with self._call() as life:
            if not self._writable:
                raise BackendUnavailable("the Mooncake store was opened read-only")
            try:
                life.mark()
                life.small.put_meta(name, data)
            except CapacityError as error:
                raise BackendUnavailable(str(error)) from error

    def get_meta(self, name: str) -> bytes | None:  # noqa: D102
        check_meta_name(name)
        with self._call() as life:
            return life.small.get_meta(name)

    def list_meta(self) -> list[str]:  # noqa: D102
        with self._call() as life:
            return life.small.list_meta()

    # -- listing ---------------------------------------------------------------------------

    def scan(self, place: str | None = None) -> Iterator[str]:  # noqa: D102
        admin = self._listing("scan")
        within = "" if place is None else check_place(place) + "/"
        with self._call():
            return self._walk(admin, within)

    def _walk(self, admin: Admin, within: str) -> Iterator[str]:
        begin = f"{self._options.prefix}/page/"
        for name in admin.names():
            if name.startswith(begin + within):
                key = name[len(begin) :]
                try:
                    check_keys((key,))
                except ValueError:  # a foreign object
                    continue
                yield key

    def usage(self) -> list[PlaceUsage]:  # noqa: D102
        admin = self._listing("usage")
        with self._call() as life:
            counts: dict[str, int] = {}
            for key in self._walk(admin, ""):
                place = key.rpartition("/")[0]
                counts[place] = counts.get(place, 0) + 1
            found = []
            for place, pages in sorted(counts.items()):
                length = life.lengths.known(place) or 0
                found.append(
                    PlaceUsage(place, pages, pages * length, pages * (length + HEADER_BYTES))
                )
            return found

    def _check_admin(self) -> None:
        if self._admin is not None and (ours := self._life.owners()):
            theirs = self._admin.owners(f"{self._options.prefix}/store")
            if theirs is not None and not ours & theirs:
                raise ConfigError(
                    f"admin port {self._admin.address} is not that of the Mooncake master at "
                    f"{self._client.settings.master}: it does not know this store's objects"
                )

    def _listing(self, method: str) -> Admin:
        if self._admin is None:
            raise self._lacks(method, "listing")
        return self._admin

    # -- health ----------------------------------------------------------------------------

    def health(self) -> None:  # noqa: D102
        with self._call() as life:
            if not self._writable:
                life.small.exist(["store"])
                return
            name, text = f"health/{os.urandom(8).hex()}", os.urandom(8)
            try:
                life.small.claim(name, text)
            except CapacityError as error:
                raise BackendUnavailable(str(error)) from error
            if life.small.get(name) != text:
                raise BackendUnavailable(
                    f"Mooncake at {self._client.settings.master} does not give back what was "
                    "written"
                )
            life.small.remove(name)

    def details(self) -> dict[str, str | int | float]:  # noqa: D102
        settings = self._client.settings
        found: dict[str, str | int | float] = {
            "master": str(settings.master), "prefix": self._options.prefix,
            "protocol": settings.protocol, "bytes lent by this process": settings.segment,
            "masters seen": self._client.line.lives,
        }  # fmt: skip
        if self._admin is not None:
            with self._call():
                lent = self._admin.lent()
            found |= {
                "owners of memory": len(lent),
                "bytes lent": sum(one.size_bytes for one in lent),
                "bytes used": sum(one.allocator_used_bytes for one in lent),
            }
        return found

    def close(self) -> None:
        """Waits up to 5 s for running calls, and leaves the library's client to the next store.

        With option `segment` it ends that client, and the pages in the memory that it lent: the
        interpreter stands still for about a second then. In a forked process it does nothing: the
        client is the parent's.
        """
        if self._client.forked:
            return
        if idle := self._gate.shut(seconds=_CLOSING):
            for start in self._buffers:
                self._client.registered.remove(start)
            give_back(self._client, idle=idle)

    # -- calls -----------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[Life]:
        with self._gate:
            self._client.check()
            if self._life.number != self._client.line.lives:
                with self._lock:
                    if self._life.number != self._client.line.lives:
                        self._life = Life(self._client, self._options.prefix)
            yield self._life

    def _judge(self, life: Life, key: str, into: Segments, done: Sequence[bool]) -> None:
        """Removes a page of another length than its place's; raises if the caller is wrong."""
        place = key.rpartition("/")[0]
        size = sum(piece.nbytes for piece in into)
        life.lengths.recheck(place, size - HEADER_BYTES)
        found = self._pages.size(key)
        if self._writable and found >= 0 and found != size:
            self._pages.remove((key,))

    def _without_memory(self, error: CapacityError) -> Exception:
        """A store without any memory is not full: it is not there."""
        with suppress(BackendUnavailable):  # without the admin port nobody knows
            if self._admin is not None and not self._admin.lent():
                return BackendUnavailable(
                    "no process lends memory to the Mooncake master at "
                    f"{self._client.settings.master}",
                    done=error.done,
                )
        return error


_open: WeakSet[MooncakeBackend] = WeakSet()


def _let_nothing_run() -> None:
    """Shuts all stores when the interpreter ends, and waits up to 5 s for what runs.

    A thread that came back from the library after the interpreter's end would abort the process.
    """
    until = time.monotonic() + _CLOSING
    for store in list(_open):
        if not store._client.forked:  # a lock may have been held when this process was forked
            store._gate.shut(max(0.0, until - time.monotonic()))


atexit.register(_let_nothing_run)
