"""`S3Backend`: the contract over objects."""

from __future__ import annotations

import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from l3store.abc import (
    META_MAX_BYTES,
    Backend,
    Capabilities,
    Check,
    PlaceUsage,
    Segments,
    call_deadline,
)
from l3store.backends._lengths import Lengths, parse_length
from l3store.backends.s3 import listing
from l3store.backends.s3.answers import Failure
from l3store.backends.s3.boto3_client import AT_ONCE
from l3store.backends.s3.names import Names
from l3store.backends.s3.opening import check_marker, connect
from l3store.backends.s3.options import S3Options, bucket_and_prefix
from l3store.backends.s3.requests import Requests
from l3store.config import load_options
from l3store.errors import BackendUnavailable, CapacityError
from l3store.keys import check_keys, check_meta_name, check_place
from l3store.page import HEADER_BYTES, check_batch, check_headers, check_meta

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from l3store.backends.s3.client import Stat
    from l3store.backends.s3.crew import Lease
    from l3store.config import StoreURL

__all__ = ["S3Backend"]

_MAX_OBJECT = 5 << 30  # of one PUT: docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_SMALL = 512 << 10  # bytes of a page, below which requests cost more than bytes
_OPENING = 10.0  # seconds at least: who has the credentials, or the host's name, may be slow
_WINDOW, _WIDEST = 16, 128  # keys that `batch_exists` asks for at once: at first, and at most

_log = logging.getLogger(__name__)


class S3Backend(Backend):
    """One object a page. Several processes and machines may use one store at once."""

    read_only_options: ClassVar = {"mode": "ro"}

    def __init__(self, bucket: str, prefix: str, options: S3Options | None = None) -> None:
        options = options or S3Options()
        self._options, self._names = options, Names(prefix, options.fanout)
        self._bucket, self._where = bucket, f"s3://{bucket}/{prefix}"
        writable = options.mode == "rw"
        self.capabilities = Capabilities(
            listing=True, delete=writable, headers=True, shared=True, durable=True,
            interruptible=True, checks=True, read_only=not writable, max_page_bytes=_MAX_OBJECT,
        )  # fmt: skip
        connected = connect(bucket, options)
        self._endpoint = connected.endpoint
        self._requests = Requests(self._where, connected, options)
        self._lengths = Lengths(self._read_length, self._claim_length)
        self._warned = False
        patience = max(_OPENING, 5 * (options.connect_timeout + options.timeout))
        try:
            with call_deadline(patience), self._requests.call(opening=True):
                self._requests.single(self._open)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_url(cls, url: StoreURL) -> S3Backend:
        """Opens the store below a prefix of a bucket, which must be there.

        Raises:
            ConfigError: An option, credential, bucket, region or certificate is wrong, the prefix
                holds another kind of store, or it may not be written; with the server's reason.
            BackendUnavailable: The server does not answer.
        """
        return cls(*bucket_and_prefix(url), load_options(S3Options, "s3", url.options))

    @classmethod
    def check_url(cls, url: StoreURL) -> bool:  # noqa: D102 - as in Backend
        bucket_and_prefix(url)
        load_options(S3Options, "s3", url.options)
        return True

    def _open(self, lease: Lease) -> None:
        writable = not self.capabilities.read_only
        check_marker(
            self._requests.client, self._names, self._options.fanout, self._where, create=writable
        )
        if writable:
            self._requests.put_small(self._names.health, _token(), lease)

    # -- pages -----------------------------------------------------------------------------

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102 - as in Backend
        check_keys(keys)
        at, window = 0, _WINDOW
        with self._requests.call():
            while at < len(keys):
                found = self._heads(keys[at : at + window])
                if False in found:
                    return at + found.index(False)
                at += len(found)
                window = min(3 * at, _WIDEST)
        return at

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        check_keys(keys)
        with self._requests.call():
            return self._heads(keys, all_of_them=True)

    def page_get(  # noqa: D102
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        lengths = check_batch(keys, into)
        done = [False] * len(keys)

        def read(i: int, lease: Lease) -> bool:
            done[i] = self._read(i, keys[i], into[i], check, lease)
            return True

        with self._requests.call(done):
            self._lengths.check_all(lengths)
            self._requests.move(len(keys), read)
            return list(done)

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        lengths = check_batch(keys, pages)
        self._check_sizes(lengths)
        done = [False] * len(keys)
        if self.capabilities.read_only:
            with self._requests.call():
                return done

        def write(i: int, lease: Lease) -> bool:
            done[i] = self._write(self._names.page(keys[i]), pages[i], lease)
            return True

        with self._requests.call(done):
            try:
                self._lengths.check_all(lengths, claim=True)
            except Failure as failure:
                if failure.kind != "full":
                    raise
                raise CapacityError(f"{self._where}: {failure}", done=done) from failure
            self._requests.move(len(keys), write)
            if keys and not any(done):
                raise CapacityError(f"{self._where}: the server has no room left", done=done)
            return list(done)

    def delete(  # noqa: D102
        self, keys: Sequence[str], headers: Sequence[bytes | None] | None = None
    ) -> list[bool]:
        check_keys(keys)
        if not self.capabilities.delete:
            raise self._lacks("delete", "delete")
        expected = check_headers(keys, headers)
        removed = [False] * len(keys)
        with self._requests.call():
            exact = [i for i, header in enumerate(expected) if header is not None]

            def remove(n: int, lease: Lease) -> bool:
                i = exact[n]
                removed[i] = self._remove_if(keys[i], expected[i], lease)
                return True

            self._requests.ask(len(exact), remove)
            # S3 does not say which of the objects that it was told to remove were there.
            rest = [i for i, header in enumerate(expected) if header is None]
            there = self._heads([keys[i] for i in rest], all_of_them=True, least=0)
            first: dict[str, int] = {}
            for i, found in zip(rest, there, strict=True):
                if found:
                    first.setdefault(self._names.page(keys[i]), i)
            names = list(first)
            for at in range(0, len(names), AT_ONCE):
                part = names[at : at + AT_ONCE]
                self._requests.single(partial(self._requests.delete_all, part))
                for name in part:
                    removed[first[name]] = True
        return removed

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:  # noqa: D102
        check_keys(keys)
        found: list[bytes | None] = [None] * len(keys)

        def read(i: int, lease: Lease) -> bool:
            found[i] = self._requests.start_of(self._names.page(keys[i]), HEADER_BYTES, lease)
            return True

        with self._requests.call():
            self._requests.ask(len(keys), read)
            return list(found)

    def scan(self, place: str | None = None) -> Iterator[str]:  # noqa: D102
        if place is not None:
            check_place(place)
        with self._requests.call():
            pass
        return (key for key, _ in listing.pages(self._names, place, self._requests.lists))

    def usage(self) -> list[PlaceUsage]:  # noqa: D102
        return listing.total(listing.pages(self._names, None, self._requests.lists))

    # -- small objects ---------------------------------------------------------------------

    def put_meta(self, name: str, data: bytes) -> None:  # noqa: D102
        check_meta(name, data)
        own = bytes(data)
        with self._requests.call():
            if self.capabilities.read_only:
                raise BackendUnavailable(f"{self._where} was opened read-only")
            self._requests.single(
                lambda lease: self._requests.put_small(self._names.meta(name), own, lease)
            )

    def get_meta(self, name: str) -> bytes | None:  # noqa: D102
        check_meta_name(name)
        with self._requests.call():
            return self._requests.single(
                lambda lease: self._requests.start_of(self._names.meta(name), META_MAX_BYTES, lease)
            )

    def list_meta(self) -> list[str]:  # noqa: D102
        names: list[str] = []
        token = ""
        while True:
            ((found, token),) = self._requests.lists([(self._names.metas, token)])
            names += [name for one in found if (name := self._names.meta_of(one.name)) is not None]
            if not token:
                return sorted(names)

    # -- health ----------------------------------------------------------------------------

    def health(self) -> None:  # noqa: D102
        def probe(lease: Lease) -> None:
            if self.capabilities.read_only:
                self._requests.start_of(self._names.marker, 1, lease)
                return
            self._requests.put_small(self._names.health, _token(), lease)
            # Another process may have written by now: what counts is that a token comes back.
            echo = self._requests.start_of(self._names.health, 64, lease)
            if echo is None or len(echo) != len(_token()):
                raise Failure("refused", "it does not give back what it took")

        with self._requests.call():
            self._requests.single(probe)

    def details(self) -> dict[str, str | int | float]:  # noqa: D102
        ask = partial(self._requests.tools.server, self._names.root)
        with self._requests.call():
            server = self._requests.single(lambda lease: self._requests.sent(ask, lease))
            return {
                "server": server, "endpoint": self._endpoint, "bucket": self._bucket,
                "prefix": self._names.root.rstrip("/"), "client": self._options.client,
                "hash digits in names": self._options.fanout,
                "requests at once": self._options.concurrency,
                "refuses what it has": "yes" if self._requests.conditions else "no",
            }  # fmt: skip

    def close(self) -> None:  # noqa: D102
        self._requests.close(seconds=5.0)

    def _heads(
        self, keys: Sequence[str], *, all_of_them: bool = False, least: int = HEADER_BYTES + 1
    ) -> list[bool]:
        # By default an object that is too small for any page is none: a server was seen that keeps
        # an empty one where a connection broke before the first byte of a PUT.
        names = [self._names.page(key) for key in keys]
        return self._requests.heads(names, least, all_of_them=all_of_them)

    # -- one page, on a worker -------------------------------------------------------------

    def _read(
        self, i: int, key: str, segments: Segments, check: Check | None, lease: Lease
    ) -> bool:
        size = sum([piece.nbytes for piece in segments])
        name = self._names.page(key)
        good = None if check is None else partial(check, i, segments)

        def fetch() -> Stat | None:
            body = self._requests.client.get(name)
            if body.size == size and body.into(segments, lease, good):
                return None
            stat = body.stat()
            body.drop()
            return stat

        try:
            damaged = self._requests.sent(fetch, lease)
        except Failure as failure:
            if failure.kind == "absent":
                return False
            raise
        if damaged is None:
            return True
        if damaged.size != size:
            self._lengths.recheck(key.rpartition("/")[0], size - HEADER_BYTES)
        if not self.capabilities.read_only:
            self._remove_that(damaged)
        return False

    def _write(self, name: str, page: Segments, lease: Lease, *, again: bool = True) -> bool:
        create = self._requests.conditions
        try:
            self._requests.sent(
                lambda: self._requests.client.put(name, page, lease, create=create), lease
            )
        except Failure as failure:
            if failure.kind == "full":
                return False
            if create and failure.kind == "there":
                # Any whole page of a key is as good as another, but this one must be whole.
                stat = self._requests.stat(name, lease)
                if stat is not None and stat.size == sum([piece.nbytes for piece in page]):
                    return True
                if stat is not None:
                    self._remove_that(stat)
                if not again:
                    raise
            elif not create or failure.kind != "unsupported":
                raise
            else:
                _log.warning("%s does not know If-None-Match: pages are replaced", self._endpoint)
                self._requests.conditions = False
            return self._write(name, page, lease, again=False)
        return True

    def _remove_that(self, stat: Stat) -> None:
        """Removes a damaged page, unless another one has come into its place."""
        try:
            now = self._requests.client.head(stat.name)
            if (now.etag, now.size) == (stat.etag, stat.size):
                self._requests.tools.delete(stat.name, stat.etag)
        except Failure as failure:
            if failure.kind not in ("absent", "there"):
                # Not the reader's trouble: the page stays refused, and the next reader tries again.
                _log.warning("%s: a damaged page could not be removed: %s", self._where, failure)

    def _remove_if(self, key: str, header: bytes | None, lease: Lease) -> bool:
        name = self._names.page(key)

        def remove() -> bool:
            stat = self._requests.client.head(name)
            if self._requests.client.read(name, HEADER_BYTES) != header:
                return False
            self._requests.tools.delete(name, stat.etag)
            return True

        try:
            return self._requests.sent(remove, lease)
        except Failure as failure:
            if failure.kind not in ("absent", "there", "empty"):
                raise
            return False

    # -- places ----------------------------------------------------------------------------

    def _read_length(self, place: str) -> int | None:
        name = self._names.length(place)
        text = self._requests.single(lambda lease: self._requests.start_of(name, 64, lease))
        return None if text is None else parse_length(text, f"s3://{self._bucket}/{name}")

    def _claim_length(self, place: str, length: int) -> None:
        name = self._names.length(place)
        self._requests.single(
            lambda lease: self._requests.put_small(name, b"%d" % length, lease, create=True)
        )

    def _check_sizes(self, lengths: Mapping[str, int]) -> None:
        for place, length in lengths.items():
            size = length + HEADER_BYTES
            if size > _MAX_OBJECT:
                raise ValueError(f"a page of {size} bytes: an object has at most {_MAX_OBJECT}")
            if size < _SMALL and not self._warned:
                self._warned = True
                _log.warning(
                    "%s: pages of %s have %d bytes, and a request costs as much as %d bytes do: "
                    "a page size (tokens a page) %d times as large would do",
                    self._where, place, size, _SMALL, -(-_SMALL // size),
                )  # fmt: skip


def _token() -> bytes:
    return secrets.token_hex(16).encode()
