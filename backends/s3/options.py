"""Options of ``s3://``, and what its URL must look like."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec

from l3store.config import Duration, without_secrets
from l3store.errors import ConfigError

if TYPE_CHECKING:
    from l3store.config import StoreURL

__all__ = ["S3Options", "bucket_and_prefix"]

_PREFIX = "l3store"
_BUCKET = re.compile(r"(?!.*\.\.)(?![0-9.]+$)[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._=+-]+")
_MOST_DIGITS, _MOST_WORKERS = 4, 256
_LONGEST = 8760 * 3600.0  # seconds: no library can wait much longer


class S3Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``s3://``."""

    endpoint: str | None = None
    """Where the server is, such as ``http://127.0.0.1:8333``; None: what the environment or the
    profile says, else AWS."""
    region: str | None = None
    """None: what the environment or the profile says, else ``us-east-1``."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Where the bucket stands: in the path or in the host name; ``auto``: in the path where an
    endpoint is given, in the host name at AWS."""
    ca_bundle: str | None = None
    """A file of certificates in PEM that the server's may be signed by."""
    verify: bool = True
    """False: takes any certificate. For tests."""
    profile: str | None = None
    """Of the AWS configuration files."""
    access_key: str | None = None
    """Better left to the environment, as are the next two."""
    secret_key: str | None = None
    session_token: str | None = None
    client: Literal["obstore", "boto3"] = "obstore"
    """Which library moves pages."""
    concurrency: int = 8
    """Requests that move pages at one time."""
    checksum: Literal["none", "sha256", "crc64nvme"] = "none"
    """What the server shall check what is written by; pages have a checksum of their own."""
    if_none_match: bool = True
    """Lets the server refuse a page that it has; False: a page that is set again is replaced."""
    fanout: int = 2
    """Digits of the page hash that object names begin with; 0: none."""
    mode: Literal["rw", "ro"] = "rw"
    """``ro`` creates and changes nothing."""
    connect_timeout: Duration = Duration(0.2)
    """For a connection."""
    timeout: Duration = Duration(1.0)
    """For one request from its beginning to its last byte."""
    retries: int = 1
    """How often a request is sent again that the server refused for now or whose connection broke;
    one that timed out is not."""

    __repr__ = without_secrets

    def __post_init__(self) -> None:
        for name in ("concurrency", "connect_timeout", "timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"option {name!r} must be positive, not {getattr(self, name)}")
        for name in ("connect_timeout", "timeout"):
            if getattr(self, name) > _LONGEST:
                raise ConfigError(f"option {name!r} is at most 8760h, not {getattr(self, name)} s")
        for name in ("region", "ca_bundle", "profile", "access_key", "secret_key", "session_token"):
            if getattr(self, name) == "":
                raise ConfigError(f"option {name!r} is empty: give it a value or leave it out")
        for name, most in (
            ("concurrency", _MOST_WORKERS),
            ("fanout", _MOST_DIGITS),
            ("retries", 1),
        ):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"option {name!r} is 0 to {most}, not {getattr(self, name)}")
        if self.endpoint is not None:
            check_endpoint(self.endpoint, "option 'endpoint'")
        if (self.access_key is None) != (self.secret_key is None):
            raise ConfigError("options 'access_key' and 'secret_key' are given together or not")
        if self.session_token is not None and self.access_key is None:
            raise ConfigError("option 'session_token' needs 'access_key' and 'secret_key'")
        if self.profile is not None and self.access_key is not None:
            raise ConfigError("options 'profile' and 'access_key' both name credentials: give one")
        if self.client == "boto3" and self.checksum == "crc64nvme":
            raise ConfigError("option 'checksum': client=boto3 knows none and sha256")


def check_endpoint(text: str, where: str) -> str:
    """Returns `text` when it is the address of a server.

    Raises:
        ConfigError: It is not; the message begins with `where`.
    """
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    more = valid and (parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc)
    if not valid or more:
        shown = re.sub(r"//.*@", "//***@", text)
        raise ConfigError(
            f"{where} = {shown!r} is not a server's address, such as "
            "'https://s3.example.com:9000'; the bucket stands in the URL: s3://bucket/prefix"
        )
    return text.rstrip("/")


def bucket_and_prefix(url: StoreURL) -> tuple[str, str]:
    """Returns the bucket and the prefix, without slashes at its ends, that a URL names.

    Raises:
        ConfigError: It names none, or they could be read in two ways.
    """
    if url.username is not None or url.port is not None:
        raise ConfigError(
            f"{url}: s3:// is followed by the bucket alone; the server is option 'endpoint', "
            "credentials come from the environment"
        )
    if not _BUCKET.fullmatch(url.host):
        raise ConfigError(
            f"{url}: {url.host!r} is no bucket name (3 to 63 lower-case letters, digits, hyphens "
            "and single dots; no address): s3://bucket/prefix?endpoint=..."
        )
    prefix = url.path.strip("/") or _PREFIX
    for part in prefix.split("/"):
        if not _PART.fullmatch(part):
            raise ConfigError(
                f"{url}: part {part!r} of the prefix must be letters, digits and any of ._=+- "
                "and neither '.' nor '..'"
            )
    return url.host, prefix
