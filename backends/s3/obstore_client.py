"""Pages by obstore: what comes in is copied once, by us; a page goes out as the list of its pieces.

One of many small pieces, or a small one, is joined first: that is cheaper than to hand them over.
obstore works on threads of its own, and hands out memory of its own: nothing it does late can
reach the caller's. Only a request that is being sent reads the caller's pages.
"""

from __future__ import annotations

import math
import os
import re
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from l3store.backends.s3.answers import Failure, answered
from l3store.backends.s3.boto3_client import keys_of
from l3store.backends.s3.client import Stat
from l3store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import boto3
    from obstore import GetResult, PutMode
    from obstore.store import ClientConfig, S3Config, S3Credential

    from l3store.abc import Segments
    from l3store.backends.s3.crew import Lease
    from l3store.backends.s3.options import S3Options

__all__ = ["ObstoreClient"]

# boto3 renews what is about to expire in 10 minutes or less: copies this old are good.
_RENEWED_AFTER, _EXPIRE_AFTER = timedelta(minutes=4), timedelta(minutes=5)
_MARGIN = 0.1  # seconds between the end of a request by its time-out and the deadline
_WORTH = 128 << 10  # bytes: handing over one more piece takes obstore as long as copying so many
_LET_GO = 0.5  # seconds for a request that failed to give the caller's memory back

_STATUS = re.compile(r"status code: (\d{3})")
_CODE, _MESSAGE = re.compile("<Code>([^<]*)</Code>"), re.compile("<Message>([^<]*)</Message>")
_BODY = re.compile(r"status code: \d{3}[^:\n]*: ?([^\n<]{1,200})")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_SYSTEM = re.compile(r'Os \{[^}]*message: "([^"]*)"')
_TLS = re.compile(r"InvalidCertificate\(\s*(\w+)|(InvalidContentType|HandshakeFailure)")

_RAISED = (BaseError, OSError, ValueError)
"""What obstore raises for what is not there and what goes wrong."""

_used_by: int | None = None  # the process whose obstore has threads


class ObstoreClient:
    """Objects of one bucket. See `client.Client`."""

    def __init__(
        self, session: boto3.Session, endpoint: str, bucket: str, region: str, options: S3Options,
        *, virtual: bool,
    ) -> None:  # fmt: skip
        global _used_by
        if _used_by not in (None, os.getpid()):
            raise ConfigError(
                "obstore was used before this process was forked and cannot be used here: start "
                "processes with spawn, or open the store with client=boto3"
            )
        _used_by = os.getpid()
        self._endpoint, self._reach = endpoint, float(options.timeout)
        self._credentials = _Credentials(session)
        timeout = timedelta(seconds=options.timeout)
        client: ClientConfig = {
            "allow_http": True, "allow_invalid_certificates": not options.verify,
            "connect_timeout": timedelta(seconds=options.connect_timeout), "timeout": timeout,
            "pool_idle_timeout": timedelta(seconds=30),
        }  # fmt: skip
        if options.ca_bundle is not None:
            client["root_certificate"] = _certificates(options.ca_bundle)
        if virtual:
            parts = urlsplit(endpoint)
            endpoint = f"{parts.scheme}://{bucket}.{parts.netloc}"
        checksum: S3Config = (
            {} if options.checksum == "none" else {"checksum_algorithm": options.checksum.upper()}
        )
        try:
            self._store = S3Store(
                bucket,
                config={
                    # All of it, or AWS_* of the environment would win over what was told.
                    "endpoint": endpoint, "aws_endpoint_url_s3": endpoint, "region": region,
                    "virtual_hosted_style_request": virtual, "unsigned_payload": True,
                    "skip_signature": False, "s3_express": False, "conditional_put": "etag",
                    **checksum,
                },
                client_options=client,
                retry_config={"max_retries": 0, "retry_timeout": timeout},
                credential_provider=self._credentials,
            )  # fmt: skip
        except (BaseError, ValueError) as error:
            raise ConfigError(f"s3://{bucket} at {endpoint}: {_first(error)}") from error

    def head(self, name: str) -> Stat:  # noqa: D102 - as in Client
        with self._asked():
            found = obstore.head(self._store, name)
        return Stat(name, found["size"], found["e_tag"] or "")

    def get(self, name: str) -> _Body:  # noqa: D102
        try:  # as `_asked`, which each page would pay for
            result = obstore.get(self._store, name)
        except _RAISED as error:
            raise _failure(error, self._endpoint) from error
        return _Body(name, result, self._endpoint)

    def read(self, name: str, limit: int) -> bytes:  # noqa: D102
        with self._asked():
            found = obstore.get(self._store, name, options={"range": (0, limit)})
            return found.bytes().to_bytes()

    def put(  # noqa: D102
        self, name: str, pieces: Sequence[memoryview], lease: Lease, *, create: bool
    ) -> None:
        self._credentials.renew()  # now: who asks a role for them may wait longer than any time-out
        mode: PutMode = "create" if create else "overwrite"
        scattered = sum([piece.nbytes for piece in pieces]) < _WORTH * len(pieces)
        if scattered or lease.left() < self._reach + _MARGIN:
            # Or the deadline may come first, and the request go on: it gets a page of its own.
            with lease:
                own = b"".join(pieces)
            with self._asked():
                obstore.put(self._store, name, own, mode=mode, use_multipart=False)
            return
        with lease:
            lent = [memoryview(piece) for piece in pieces]
            try:
                obstore.put(self._store, name, lent, mode=mode, use_multipart=False)
            except _RAISED as error:
                _wait_for(lent)
                raise _failure(error, self._endpoint) from error

    def close(self) -> None:  # noqa: D102
        del self._store

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except _RAISED as error:
            raise _failure(error, self._endpoint) from error


class _Credentials:
    """boto3's, as obstore asks for them."""

    def __init__(self, session: boto3.Session) -> None:
        self._source = session.get_credentials()
        self._renew_at = -math.inf
        self._kept: S3Credential

    def __call__(self) -> S3Credential:
        self.renew()
        return {**self._kept, "expires_at": datetime.now(UTC) + _EXPIRE_AFTER}

    def renew(self) -> None:
        """Asks boto3 where that is due, which may ask a server."""
        if time.monotonic() < self._renew_at:
            return
        now = keys_of(self._source)
        self._kept = {
            "access_key_id": now.access_key, "secret_access_key": now.secret_key,
            "token": now.token, "expires_at": None,
        }  # fmt: skip
        self._renew_at = time.monotonic() + _RENEWED_AFTER.total_seconds()


class _Body:
    """An answer whose body obstore collects in memory of its own."""

    def __init__(self, name: str, result: GetResult, endpoint: str) -> None:
        self._name, self._result, self._endpoint = name, result, endpoint
        self.size = result.range[1]

    def stat(self) -> Stat:
        meta = self._result.meta
        return Stat(self._name, meta["size"], meta["e_tag"] or "")

    def into(self, segments: Segments, lease: Lease, check: Callable[[], bool] | None) -> bool:
        try:
            data = memoryview(self._result.bytes())
        except _RAISED as error:
            raise _failure(error, self._endpoint) from error
        if data.nbytes != self.size:
            raise Failure("lost", f"{data.nbytes} of {self.size} bytes came")
        with lease:
            at = 0
            for piece in segments:
                end = at + piece.nbytes
                piece[:] = data[at:end]
                at = end
            return check is None or check()

    def drop(self) -> None:
        del self._result


def _wait_for(lent: Sequence[memoryview]) -> None:
    """Waits until a request that failed has let go of the memory it was sent from."""
    until = time.monotonic() + _LET_GO
    for view in lent:
        while True:
            try:
                view.release()
            except BufferError:
                if time.monotonic() > until:
                    return
                time.sleep(0.001)
            else:
                break


def _certificates(path: str | Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"option 'ca_bundle' = {path!r}: {error.strerror}") from error


def _failure(error: Exception, endpoint: str) -> Failure:
    """Reads what obstore says; it has no other way to tell a status or a time-out."""
    text = str(error)
    if status := _STATUS.search(text):
        code, message = (
            found and found[1] for found in (_CODE.search(text), _MESSAGE.search(text))
        )
        plain = _BODY.search(text)  # proxies and web servers say it without XML
        return answered(int(status[1]), code or "", message or (plain[1].strip() if plain else ""))
    if isinstance(error, FileNotFoundError):
        return Failure("absent", _first(error))
    if tls := _TLS.search(text):
        return Failure(
            "config", f"{endpoint}: its certificate or TLS is refused: {tls[1] or tls[2]}"
        )
    if "redirect without LOCATION" in text:
        return Failure("config", f"{endpoint}: the bucket is in another region (option 'region')")
    kind = _KIND.search(text)
    if "TimedOut" in text or (kind and kind[1] == "Timeout"):
        return Failure("late", f"{endpoint} did not answer in time")
    if kind:
        system = _SYSTEM.search(text)
        why = system[1] if system else "no such host" if "dns error" in text else "connection lost"
        return Failure("lost", f"{endpoint}: {why}")
    return Failure("refused", _first(error))


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0]
