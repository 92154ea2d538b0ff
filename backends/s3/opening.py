"""Opens a store: the server, who asks, and whether the prefix is a store of this kind."""

from __future__ import annotations

import os
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec

from l3store.backends.s3.answers import Failure
from l3store.backends.s3.boto3_client import Boto3Client, session_of
from l3store.backends.s3.crew import Lease
from l3store.backends.s3.options import check_endpoint
from l3store.errors import ConfigError

if TYPE_CHECKING:
    import boto3

    from l3store.backends.s3.client import Client
    from l3store.backends.s3.names import Names
    from l3store.backends.s3.options import S3Options

__all__ = ["FORMAT", "Connected", "check_marker", "connect"]

FORMAT = 1
_KIND = "s3"
_LIMIT = 4096  # bytes of a marker


class _Marker(msgspec.Struct):
    format: int
    kind: str
    fanout: int = 0


class Connected(NamedTuple):
    """Ways to one bucket."""

    client: Client
    """Moves pages."""
    tools: Boto3Client
    endpoint: str


def connect(bucket: str, options: S3Options) -> Connected:
    """Makes the clients. Sends nothing, but for credentials that are asked of a machine's role.

    Raises:
        ConfigError: There are no credentials, or an option is wrong.
    """
    session = session_of(options)
    told = options.endpoint or _endpoint_elsewhere(session)
    region = (
        options.region or os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
    )  # boto3 looks at AWS_DEFAULT_REGION alone
    virtual = options.addressing == "virtual" or (
        options.addressing == "auto" and told is None and "." not in bucket
    )
    tools = Boto3Client(session, told, bucket, region, options, virtual=virtual)
    endpoint = told or tools.endpoint
    if virtual and (host := _address_in(endpoint)):
        raise ConfigError(
            f"option 'addressing' = 'virtual': the bucket cannot stand before {host!r}, which is "
            "an address and no name; say addressing=path"
        )
    if options.client == "boto3":
        return Connected(tools, tools, endpoint)
    # Imported here: its threads would not survive a fork, and whoever has them needs boto3 alone.
    from l3store.backends.s3.obstore_client import ObstoreClient

    client = ObstoreClient(session, endpoint, bucket, region, options, virtual=virtual)
    return Connected(client, tools, endpoint)


def _address_in(endpoint: str) -> str:
    """Returns the IP address that an endpoint names, or "" for a name."""
    host = urlsplit(endpoint).hostname or ""
    try:
        ip_address(host)
    except ValueError:
        return ""
    return host


def _endpoint_elsewhere(session: boto3.Session) -> str | None:
    """Returns what the environment or the profile names, as AWS tools read them."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if text := os.environ.get(name):
            return check_endpoint(text, f"environment {name}")
    profile = session._session.get_scoped_config()
    text = profile.get("endpoint_url")
    return check_endpoint(text, "'endpoint_url' of the profile") if text else None


def check_marker(client: Client, names: Names, fanout: int, where: str, *, create: bool) -> None:
    """Accepts the store below a prefix, which is made where it is missing.

    Blocks for one request, or three. Two processes may make one store at the same time.

    Args:
        client: The way to it.
        names: Its names.
        fanout: Hash digits in names.
        where: The store, for messages.
        create: Write the marker where it is missing.

    Raises:
        ConfigError: It is a store of another kind, format or fanout, or none and not to be made.
        Failure: The server says no.
    """
    data = _read(client, names)
    if data is None:
        if not create:
            raise ConfigError(
                f"{where} is not a store: it has no {names.marker}. Who writes makes it; or name "
                "the prefix of one: s3://bucket/prefix"
            )
        _make(client, names, _Marker(FORMAT, _KIND, fanout))
        data = _read(client, names) or b""
    try:
        marker = msgspec.json.decode(data, type=_Marker)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: {names.marker} does not describe a store: {error}") from error
    if marker.kind != _KIND:
        raise ConfigError(f"{where} is a store of kind {marker.kind!r}: open it as such")
    if marker.format != FORMAT:
        raise ConfigError(
            f"{where} has format {marker.format}; this version reads format {FORMAT}: name another "
            "prefix, or read it with the version that wrote it"
        )
    if marker.fanout != fanout:
        raise ConfigError(
            f"{where} was made with fanout={marker.fanout}, not {fanout}: say fanout="
            f"{marker.fanout}, or name another prefix"
        )


def _read(client: Client, names: Names) -> bytes | None:
    try:
        return client.read(names.marker, _LIMIT)
    except Failure as failure:
        if failure.kind == "absent":
            return None
        if failure.kind == "empty":
            return b""
        raise


def _make(client: Client, names: Names, marker: _Marker) -> None:
    text = memoryview(msgspec.json.encode(marker))
    try:
        client.put(names.marker, [text], Lease(), create=True)
    except Failure as failure:
        if failure.kind == "unsupported":
            client.put(names.marker, [text], Lease(), create=False)
        elif failure.kind != "there":  # another process was first
            raise
