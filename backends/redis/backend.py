"""The backend over one server, the master that sentinels name, or a cluster."""

from __future__ import annotations

import os
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import msgspec

from l3store.abc import Backend, Capabilities, Check, PlaceUsage, Segments
from l3store.backends._lengths import Lengths, parse_length
from l3store.backends.redis import details
from l3store.backends.redis.lookup import stored
from l3store.backends.redis.names import Names
from l3store.backends.redis.opening import open_store
from l3store.backends.redis.options import RedisOptions
from l3store.backends.redis.refusals import FAULTS, Refused, at_open, typed
from l3store.backends.redis.requests import each, request
from l3store.backends.redis.servers import connect
from l3store.backends.redis.store import Store
from l3store.backends.redis.transfer import Transfer
from l3store.backends.redis.wire import OutOfStep
from l3store.calls import Gate, refuse_fork
from l3store.config import StoreURL, load_options
from l3store.errors import BackendUnavailable, ConfigError
from l3store.keys import check_keys, check_meta_name, check_place
from l3store.page import HEADER_BYTES, check_batch, check_headers, check_meta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["RedisBackend"]

_SCANNED = 1000  # names that one SCAN looks at
_ECHO_MS = 10_000  # life of what a health check leaves behind when it is killed


class RedisBackend(Backend):
    """One string a page. Many processes and machines may use one store at once."""

    read_only_options: ClassVar = {"mode": "ro"}

    def __init__(self, url: StoreURL, options: RedisOptions | None = None) -> None:
        options = options or RedisOptions()
        self._name, self._process = str(url), os.getpid()
        self._gate, self._names = Gate(self._name), Names(options.prefix)
        try:
            self._store = Store(connect(url, options), options.connections)
            try:
                limits = open_store(self._store, self._names, options)
            except BaseException:
                self._store.close()
                raise
        except FAULTS as error:
            raise at_open(error, self._name) from error
        writable = options.mode == "rw"
        self.capabilities = Capabilities(
            listing=True, delete=writable, headers=True, shared=True, durable=True, checks=True,
            interruptible=True, read_only=not writable, max_page_bytes=limits.page_bytes,
        )  # fmt: skip
        self._lengths = Lengths(self._read_length, self._claim_length)
        self._pages = Transfer(self._store, self._names, self._lengths, options, limits)

    @classmethod
    def from_url(cls, url: StoreURL) -> RedisBackend:
        """Opens the store of a prefix, on the server or servers that the URL names.

        Raises:
            ConfigError: An option is wrong; the server refuses user, database or TLS, and says
                why; or what is there is no store of this kind and format.
            BackendUnavailable: Nobody answers there.
        """
        return cls(url, _options(url))

    @classmethod
    def check_url(cls, url: StoreURL) -> bool:  # noqa: D102 - as in Backend
        _options(url)
        return True

    # -- pages -----------------------------------------------------------------------------

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102 - as in Backend
        found = self.exists_each(keys)
        return found.index(False) if False in found else len(found)

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        check_keys(keys)
        with self._call():
            return stored(self._store, self._names.pages(keys))

    def page_get(  # noqa: D102
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        lengths = check_batch(keys, into)
        with self._call():
            self._lengths.check_all(lengths)
            return self._pages.read(keys, into, lengths, check)

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        lengths = check_batch(keys, pages)
        most = self.capabilities.max_page_bytes - HEADER_BYTES
        for place, length in lengths.items():
            if length > most:
                raise ValueError(
                    f"pages of {place} have {length} payload bytes; this server takes {most} at "
                    f"most (proto-max-bulk-len {self.capabilities.max_page_bytes})"
                )
        with self._call():
            if self.capabilities.read_only:
                return [False] * len(keys)
            return self._pages.write(keys, pages, lengths)

    def delete(  # noqa: D102
        self, keys: Sequence[str], headers: Sequence[bytes | None] | None = None
    ) -> list[bool]:
        check_keys(keys)
        if not self.capabilities.delete:
            raise self._lacks("delete", "delete")
        expected = check_headers(keys, headers)
        with self._call():
            return self._pages.remove(self._names.pages(keys), expected)

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:  # noqa: D102
        check_keys(keys)
        with self._call():
            names = self._names.pages(keys)
            wanted = each((b"GETRANGE",), names, (b"0", b"%d" % (HEADER_BYTES - 1)))
            found = self._store.replies(names, wanted)
            for reply in found:
                if isinstance(reply, Refused) and reply.code != "WRONGTYPE":
                    raise reply
            # A range of nothing is empty, not None.
            return [reply if isinstance(reply, bytes) and reply else None for reply in found]

    def scan(self, place: str | None = None) -> Iterator[str]:  # noqa: D102
        pattern = self._names.pattern(None if place is None else check_place(place))
        with self._call():
            masters = self._store.servers.masters()
        seen: set[int] = set()  # SCAN may name one twice; hashes, as there may be millions
        for master in masters:
            cursor = b"0"
            while True:
                with self._call(), master.lend() as wire:
                    said = wire.ask(
                        "SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED, "TYPE", "string"
                    )
                    cursor, names = _scanned(said)
                for key in filter(None, map(self._names.key, names)):
                    if hash(key) not in seen:
                        seen.add(hash(key))
                        yield key
                if cursor == b"0":
                    break

    def usage(self) -> list[PlaceUsage]:  # noqa: D102
        counts: dict[str, int] = {}
        samples: dict[str, str] = {}
        for key in self.scan():
            place = key.rpartition("/")[0]
            counts[place] = counts.get(place, 0) + 1
            samples[place] = key
        with self._call():
            names = dict(zip(samples, self._names.pages(list(samples.values())), strict=True))
            return [
                details.usage_of(
                    self._store, names[place], place, count, self._lengths.known(place)
                )
                for place, count in sorted(counts.items())
            ]

    # -- small objects -----------------------------------------------------------------------

    def put_meta(self, name: str, data: bytes) -> None:  # noqa: D102
        check_meta(name, data)
        with self._call():
            if self.capabilities.read_only:
                raise BackendUnavailable(f"{self._name} was opened read-only")
            at = self._names.meta
            self._store.ask(at, request("HSET", at, name, bytes(data)))

    def get_meta(self, name: str) -> bytes | None:  # noqa: D102
        check_meta_name(name)
        with self._call():
            (found,) = self._store.ask(self._names.meta, request("HGET", self._names.meta, name))
            return found if isinstance(found, bytes) else None

    def list_meta(self) -> list[str]:  # noqa: D102
        with self._call():
            (found,) = self._store.ask(self._names.meta, request("HKEYS", self._names.meta))
            return sorted(filter(None, map(_meta_name, found))) if isinstance(found, list) else []

    # -- health ----------------------------------------------------------------------------

    def health(self) -> None:  # noqa: D102
        with self._call():
            for master in self._store.servers.masters():
                with master.lend() as wire:
                    wire.ask("PING")
            if self.capabilities.read_only:
                return
            word = uuid.uuid4().hex.encode()
            name = self._names.health + word
            _, echo, _ = self._store.ask(
                name,
                request("SET", name, word, "PX", _ECHO_MS),
                request("GET", name),
                request("UNLINK", name),
            )
            if echo != word:
                raise BackendUnavailable(f"{self._name} does not give back what it took")

    def details(self) -> dict[str, str | int | float]:  # noqa: D102
        with self._call():
            return details.of(self._store)

    def close(self) -> None:  # noqa: D102
        if os.getpid() != self._process:
            return  # the connections are the parent's, and a lock may be held for ever
        if self._gate.shut(seconds=5.0):
            self._store.close()

    # -- what calls are made of --------------------------------------------------------------

    def _read_length(self, place: str) -> int | None:
        at = self._names.lengths
        (found,) = self._store.ask(at, request("HGET", at, place))
        return (
            parse_length(found, f"field {place} of {at.decode()}")
            if isinstance(found, bytes)
            else None
        )

    def _claim_length(self, place: str, length: int) -> None:
        at = self._names.lengths
        self._store.ask(at, request("HSETNX", at, place, length))

    @contextmanager
    def _call(self) -> Iterator[None]:
        refuse_fork(self._process)  # its connections are the parent's
        with self._gate:
            try:
                yield
            except FAULTS as error:
                raise typed(error, self._name) from error


def _scanned(said: object) -> tuple[bytes, list[bytes]]:
    """The cursor and the names of a SCAN's reply."""
    match said:
        case [bytes() as cursor, [*found]]:
            names = [name for name in found if isinstance(name, bytes)]
            if len(names) == len(found):
                return cursor, names
    raise OutOfStep("what was said to a SCAN is no reply to it")


def _meta_name(raw: object) -> str | None:
    """The name of a small object; None: somebody else has put it there."""
    try:
        return check_meta_name(raw.decode("ascii")) if isinstance(raw, bytes) else None
    except ValueError:  # UnicodeDecodeError is one, too
        return None


def _options(url: StoreURL) -> RedisOptions:
    options = load_options(RedisOptions, "redis", url.options)
    if url.scheme != "unix" and (number := url.path.strip("/")):
        if not (number.isascii() and number.isdigit()):
            raise ConfigError(f"{url}: a path is the number of a database, such as /0")
        if options.db not in (0, int(number)):
            raise ConfigError(f"{url}: option 'db' = {options.db} names another database")
        options = msgspec.structs.replace(options, db=int(number))
    return options
