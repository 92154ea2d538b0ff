"""What a server or the way to it says no by, whatever library brings the news.

| kind | what | becomes |
|---|---|---|
| absent | no such object | a miss |
| there | a condition does not hold: the object is there, or is another | stored, or not removed |
| empty | the range asked for lies behind the end | no bytes |
| full | a quota or a disk | False, `CapacityError` |
| config | credentials, bucket, region, certificate | `ConfigError` at open, then unavailable |
| refused | anything else that would be refused again | the same |
| unsupported | the server does not know how | asked in a plainer way |
| busy | 429, 500, 503: may be asked again | unavailable |
| lost | no connection, or it broke | unavailable |
| late | no answer in time | `BackendTimeout` |
"""

from __future__ import annotations

import re
from typing import Literal

from l3store.errors import BackendTimeout, BackendUnavailable, ConfigError, L3Error

__all__ = ["AGAIN", "Failure", "Kind", "answered"]

Kind = Literal[
    "absent", "there", "empty", "full", "config", "refused", "unsupported", "busy", "lost", "late"
]

AGAIN: frozenset[Kind] = frozenset({"busy", "lost"})
"""What may go well when it is sent again."""

_BY_STATUS: dict[int, Kind] = {
    301: "config", 307: "config", 401: "config", 403: "config", 404: "absent", 409: "busy",
    412: "there", 416: "empty", 429: "busy", 500: "busy", 501: "unsupported", 502: "busy",
    503: "busy", 504: "busy", 507: "full",
}  # fmt: skip
# Codes of docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html that say more than the status
_BY_CODE: dict[str, Kind] = {
    "NoSuchBucket": "config", "InvalidBucketName": "config", "PermanentRedirect": "config",
    "AuthorizationHeaderMalformed": "config", "InvalidToken": "config", "ExpiredToken": "config",
    "InvalidAccessKeyId": "config", "NotImplemented": "unsupported", "SlowDown": "busy",
    "RequestTimeout": "busy", "InternalError": "busy", "ServiceUnavailable": "busy",
}  # fmt: skip
_FULL = re.compile("Quota|StorageFull|InsufficientStorage")  # Ceph, MinIO, and those like them


class Failure(Exception):
    """A request that did not do what it was sent for.

    Attributes:
        kind: What it means (the table above).
    """

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind: Kind = kind

    def typed(self, where: str, *, opening: bool = False) -> L3Error:
        """Returns it as an error of the contract, with the server's own reason.

        Args:
            where: The store.
            opening: What would be refused again is the configuration's fault.
        """
        text = f"{where}: {self}"
        if self.kind == "late":
            return BackendTimeout(text)
        if opening and self.kind not in AGAIN:
            return ConfigError(text)
        return BackendUnavailable(text)


def answered(status: int, code: str, message: str) -> Failure:
    """Returns what an answer of a server means: its status, and the code and text of its body."""
    kind = _BY_CODE.get(code)
    if kind is None:
        kind = "full" if _FULL.search(code) else _BY_STATUS.get(status, "refused")
    text = " ".join(part for part in (str(status), code, message) if part)
    return Failure(kind, text)
