"""What servers and redis-py say when they refuse, in our words."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import redis
from redis.exceptions import RedisClusterException

from l3store.errors import BackendTimeout, BackendUnavailable, ConfigError, L3Error

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FAULTS", "Refused", "at_open", "typed"]

_WRONG = {  # what a server says when it is asked wrongly, and what would be right
    "NOAUTH": "", "WRONGPASS": "", "NOPERM": "", "ERR": "",
    "READONLY": ": name its master, or sentinel=<master>, or read only with mode=ro",
    "MOVED": ": it is a node of a cluster, add cluster=yes",
}  # fmt: skip


class Refused(Exception):
    """An error reply. The stream is still in step: each reply belongs to one request."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = line.split(" ", 1)[0]
        """Its first word: ``OOM``, ``MOVED``, ``ERR``, ..."""

    @classmethod
    def by(cls, line: bytes) -> Refused:
        """Returns the error of a reply's line, which begins with a minus."""
        return cls(line[1:].decode("utf-8", "replace"))

    @property
    def elsewhere(self) -> bool:
        """The key is, or may be, another server's: worth one more try there."""
        return self.code in ("MOVED", "ASK", "TRYAGAIN", "READONLY")

    @property
    def asks(self) -> tuple[str, int] | None:
        """Of an ASK: the server that has the key by now, or will have."""
        if self.code != "ASK":
            return None
        host, _, port = str(self).rsplit(" ", 1)[-1].rpartition(":")
        if not host:  # a server may keep its name to itself
            return None
        return (host, int(port)) if port.isascii() and port.isdecimal() else None


FAULTS = (redis.RedisError, RedisClusterException, OSError, Refused)
"""What a call over the wire may raise."""


def typed(error: BaseException, what: str, done: Sequence[bool] = ()) -> L3Error:
    """Returns the error of a call that `what` could not end.

    Args:
        error: Of the server, of redis-py, or of the socket.
        what: The store, for the message.
        done: What is good all the same.
    """
    if isinstance(error, L3Error):
        return error
    # BlockingIOError: a kernel time-out of a socket (socket(7), SO_RCVTIMEO).
    if isinstance(error, redis.TimeoutError | TimeoutError | BlockingIOError):
        return BackendTimeout(f"{what}: no answer in time", done=done)
    return BackendUnavailable(f"{what}: {_words(error)}", done=done)


def at_open(error: BaseException, what: str) -> L3Error:
    """Returns the error of opening: `ConfigError` where the server says that we ask wrongly."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError) and "handshake" in str(cause):  # ssl tells it so
            return BackendTimeout(f"{what}: no answer to a TLS handshake; is TLS spoken there?")
        if isinstance(cause, ssl.SSLError):
            return ConfigError(f"{what}: TLS is refused: {_words(cause)}")
        if isinstance(cause, redis.ResponseError) and "command 'SENTINEL'" in str(cause):
            return ConfigError(f"{what}: it is no sentinel, leave out sentinel=")
        if isinstance(cause, redis.AuthenticationError | redis.ResponseError):
            return ConfigError(f"{what}: {_words(cause)}")
        if isinstance(cause, Refused) and str(cause).startswith("ERR unknown command"):
            return ConfigError(f"{what}: {_words(cause)}: of a sentinel? Add sentinel=<master>")
        if isinstance(cause, Refused) and cause.code in _WRONG:
            return ConfigError(f"{what}: {_words(cause)}{_WRONG[cause.code]}")
        if isinstance(cause, RedisClusterException) and "not enabled" in str(cause):
            return ConfigError(f"{what}: it is no cluster, leave out cluster=yes")
        cause = cause.__cause__ or cause.__context__
    return typed(error, what)


def _words(error: BaseException) -> str:
    code = getattr(error, "status_code", None)  # redis-py cuts it off the text
    text = " ".join(str(error).split()).rstrip(".")
    text = f"{code} {text}" if code and not text.startswith(str(code)) else text
    return text or type(error).__name__
