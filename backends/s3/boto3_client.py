"""Objects by boto3: what tools ask for, and with ``client=boto3`` pages, too.

As a way for pages it copies: boto3 takes no memoryview, so a page that is stored is joined first,
and one that is read comes through memory of its library. It is about as fast as Python's HTTP.
"""

from __future__ import annotations

import time
from base64 import b64encode
from contextlib import contextmanager
from functools import lru_cache
from hashlib import md5
from typing import TYPE_CHECKING, Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    ConnectTimeoutError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.exceptions import HTTPError as TransportError
from urllib3.exceptions import TimeoutError as TransportTimeout

from l3store.backends.s3.answers import Failure, answered
from l3store.backends.s3.client import Stat
from l3store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from l3store.abc import Segments
    from l3store.backends.s3.crew import Lease
    from l3store.backends.s3.options import S3Options

__all__ = ["AT_ONCE", "Boto3Client", "keys_of", "session_of"]

AT_ONCE = 1000
"""Most objects that one request lists or deletes: a limit of S3."""

_CHUNK = 256 * 1024
_CONNECTIONS = 64  # kept, beside those that move pages


@lru_cache(maxsize=1)
def _models() -> Any:
    """What describes S3 to botocore: megabytes of JSON, read once a process."""
    return botocore.session.get_session().get_component("data_loader")


def session_of(options: S3Options) -> boto3.Session:
    """Returns a session that knows the credentials.

    Raises:
        ConfigError: There are none, or no such profile.
    """
    try:
        core = botocore.session.get_session()
        core.register_component("data_loader", _models())  # it looks at AWS_PROFILE, too
        session = boto3.Session(
            aws_access_key_id=options.access_key, aws_secret_access_key=options.secret_key,
            aws_session_token=options.session_token, profile_name=options.profile,
            botocore_session=core,
        )  # fmt: skip
        found = session.get_credentials()
    except Exception as error:  # what a helper program answers is read without care
        raise ConfigError(f"s3: no credentials: {_said(error)}") from error
    if found is None:
        raise ConfigError(
            "s3: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or "
            "option 'profile', or give this machine a role"
        )
    return session


def keys_of(source: Any) -> Any:
    """Returns the credentials of now; where they are about to expire it asks who gives them.

    Raises:
        Failure: They are not to be had.
    """
    try:
        return source.get_frozen_credentials()
    except (ConnectionError, HTTPClientError) as error:
        raise Failure("lost", f"no credentials: {error}") from error
    except Exception as error:  # a role's refusal, a helper program's answer, credentials of old
        raise Failure("config", f"no credentials: {_said(error)}") from error


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, BotoCoreError) else f"{type(error).__name__}: {error}"


class Boto3Client:
    """Objects of one bucket. See `client.Client` and `client.Tools`."""

    def __init__(
        self, session: boto3.Session, endpoint: str | None, bucket: str, region: str,
        options: S3Options, *, virtual: bool,
    ) -> None:  # fmt: skip
        self._bucket, self._reach = bucket, float(options.timeout)
        self._checksum = {} if options.checksum == "none" else {"ChecksumAlgorithm": "SHA256"}
        self._matches = True
        self._credentials = session.get_credentials()
        try:
            self._s3: Any = session.client(
                "s3", region_name=region, endpoint_url=endpoint,
                verify=(options.ca_bundle or True) if options.verify else False,
                config=Config(
                    connect_timeout=float(options.connect_timeout), read_timeout=self._reach,
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    max_pool_connections=options.concurrency + _CONNECTIONS,
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    s3={"addressing_style": "virtual" if virtual else "path",
                        "payload_signing_enabled": False},
                ),
            )  # fmt: skip
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"s3://{bucket}: {error}") from error
        self._s3.meta.events.register("before-sign.s3.DeleteObjects", _with_md5)

    @property
    def endpoint(self) -> str:
        """Where it sends requests."""
        return str(self._s3.meta.endpoint_url)

    # -- pages -----------------------------------------------------------------------------

    def head(self, name: str) -> Stat:  # noqa: D102 - as in Client
        return _stat(name, self._ask("head_object", Key=name))

    def get(self, name: str) -> _Body:  # noqa: D102
        began = time.monotonic()
        return _Body(name, self._ask("get_object", Key=name), began + self._reach)

    def read(self, name: str, limit: int) -> bytes:  # noqa: D102
        answer = self._ask("get_object", Key=name, Range=f"bytes=0-{limit - 1}")
        with _asked(), answer["Body"] as body:
            return bytes(body.read(limit))

    def put(  # noqa: D102
        self, name: str, pieces: Sequence[memoryview], lease: Lease, *, create: bool
    ) -> None:
        with lease:
            own = b"".join(pieces)
        condition = {"IfNoneMatch": "*"} if create else {}
        self._ask("put_object", Key=name, Body=own, **condition, **self._checksum)

    # -- tools -----------------------------------------------------------------------------

    def list(self, prefix: str, token: str) -> tuple[list[Stat], str]:  # noqa: D102
        begin = {"ContinuationToken": token} if token else {}
        answer = self._ask("list_objects_v2", Prefix=prefix, MaxKeys=AT_ONCE, **begin)
        found = [
            Stat(one["Key"], one["Size"], one.get("ETag", "")) for one in answer.get("Contents", ())
        ]
        if not answer.get("IsTruncated"):
            return found, ""
        further = answer.get("NextContinuationToken", "")
        if further in ("", token):  # what is left would be passed over, or listed for ever
            raise Failure("refused", "a list has more, and it is not said where it goes on")
        return found, further

    def delete(self, name: str, etag: str) -> None:  # noqa: D102
        if self._matches and etag:
            try:
                self._ask("delete_object", Key=name, IfMatch=etag)
            except Failure as failure:
                if failure.kind != "unsupported":
                    raise
                self._matches = False
            else:
                return
        self._ask("delete_object", Key=name)

    def delete_all(self, names: Sequence[str]) -> None:  # noqa: D102
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        answer = self._ask("delete_objects", Delete=wanted)
        for error in answer.get("Errors", ()):
            if error.get("Code") == "NoSuchKey":
                continue
            raise answered(0, error.get("Code", ""), f"{error.get('Key')}: {error.get('Message')}")

    def server(self, prefix: str) -> str:  # noqa: D102
        answer = self._ask("list_objects_v2", Prefix=prefix, MaxKeys=1)
        return str(answer["ResponseMetadata"]["HTTPHeaders"].get("server", "does not say"))

    def close(self) -> None:  # noqa: D102
        self._s3.close()

    def _ask(self, operation: str, **given: Any) -> Any:
        keys_of(self._credentials)
        with _asked():
            try:
                return getattr(self._s3, operation)(Bucket=self._bucket, **given)
            except (RecursionError, HTTPClientError) as error:
                # A redirect that does not say where to: botocore asks for the region for ever.
                if isinstance(error, RecursionError) or isinstance(
                    error.__context__, RecursionError
                ):
                    raise Failure("config", "the bucket is in another region") from error
                raise


class _Body:
    """An answer whose body comes in pieces, none of which is waited for past `until`."""

    def __init__(self, name: str, answer: Any, until: float) -> None:
        self._stream, self._until = answer["Body"], until
        # Its own `read` waits for all it is asked for, however slowly that comes.
        self._read_some: Callable[[int], bytes] = self._stream._raw_stream.read1
        try:
            self._stat = _stat(name, answer)
        except Failure:
            self.drop()
            raise
        self.size = self._stat.size

    def stat(self) -> Stat:
        return self._stat

    def into(self, segments: Segments, lease: Lease, check: Callable[[], bool] | None) -> bool:
        with _asked(), self._stream:
            for piece in segments:
                at = 0
                while at < piece.nbytes:
                    data = self._read_some(min(_CHUNK, piece.nbytes - at))
                    if not data:
                        raise Failure("lost", "the body ended before its length")
                    if time.monotonic() > self._until:
                        raise Failure("late", "the body did not arrive in time")
                    with lease:
                        piece[at : at + len(data)] = data
                    at += len(data)
        with lease:
            return check is None or check()

    def drop(self) -> None:
        self._stream.close()


def _with_md5(request: Any, **_: Any) -> None:
    """Many servers know no other checksum of the list of what is to go; botocore has given it up.

    docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html
    """
    digest = md5(request.body, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = b64encode(digest).decode()


def _stat(name: str, answer: Any) -> Stat:
    if "ContentLength" not in answer:
        raise Failure("refused", "the answer does not say how long it is")
    return Stat(name, answer["ContentLength"], answer.get("ETag", ""))


@contextmanager
def _asked() -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        said = error.response.get("Error", {})
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(said.get("Code", ""))
        text = str(said.get("Message", ""))
        raise answered(status, "" if code.isdigit() else code, text) from error
    except (ConnectTimeoutError, ReadTimeoutError) as error:
        raise Failure("late", str(error)) from error
    except (SSLError, NoCredentialsError) as error:
        raise Failure("config", str(error)) from error
    except (ConnectionError, HTTPClientError, IncompleteReadError) as error:
        raise Failure("lost", str(error)) from error
    except BotoCoreError as error:
        raise Failure("refused", str(error)) from error
    except TransportTimeout as error:
        raise Failure("late", str(error)) from error
    except (TransportError, OSError) as error:
        raise Failure("lost", str(error)) from error
