"""The master's admin port (HTTP): the only place that lists objects and memory."""

from __future__ import annotations

from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, IncompleteRead
from typing import TYPE_CHECKING

import msgspec

from l3store.abc import time_left
from l3store.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from http.client import HTTPResponse

    from l3store.backends.mooncake.options import Address

__all__ = ["Admin", "Lent"]

_LONGEST_NAME = 1 << 16
_ABSENT = -704


class Lent(msgspec.Struct):
    """Memory that one process lends."""

    segment_name: str
    size_bytes: int
    allocator_used_bytes: int = 0


class _Segments(msgspec.Struct):
    segments: list[Lent] = []


class _Replica(msgspec.Struct):
    endpoint: str = msgspec.field(name="transport_endpoint_", default="")


class _Replicas(msgspec.Struct):
    data: list[_Replica] = []
    error_code: int = 0


class Admin:
    """Asks the admin port. Thread-safe: each question has a connection of its own."""

    def __init__(self, address: Address, seconds: float) -> None:
        self.address, self._seconds = address, seconds

    def names(self) -> Iterator[str]:
        """Yields the names of all objects of the master, whoever stored them, as they arrive.

        Raises:
            BackendUnavailable: It does not answer, also in the middle.
        """
        with self._asked("/get_all_keys") as answer:
            while line := answer.readline(_LONGEST_NAME):
                yield line.rstrip(b"\n").decode("utf-8", "replace")
            if answer.length:  # `readline` takes an end for one, wherever it comes
                raise IncompleteRead(b"", answer.length)

    def lent(self) -> list[Lent]:
        """Returns the memory that is mounted.

        Raises:
            BackendUnavailable: It does not answer.
        """
        with self._asked("/get_segments_detail") as answer:
            return msgspec.json.decode(answer.read(), type=_Segments).segments

    def check(self) -> None:
        """Returns when it answers.

        Raises:
            BackendUnavailable: It does not.
        """
        with self._asked("/health") as answer:
            answer.read()

    def owners(self, name: str) -> set[str] | None:
        """Returns where an object lies; None where this port does not tell such things.

        Raises:
            BackendUnavailable: It does not answer.
        """
        with self._asked(f"/query_key?key={name}", good=(200, 404)) as answer:
            body = answer.read()
        try:
            found = msgspec.json.decode(body, type=_Replicas)
        except msgspec.MsgspecError:
            return None
        known = {one.endpoint for one in found.data}
        return known if known or found.error_code == _ABSENT else None

    @contextmanager
    def _asked(self, path: str, good: Collection[int] = (200,)) -> Iterator[HTTPResponse]:
        left = time_left()
        seconds = self._seconds if left is None else max(0.001, min(left, self._seconds))
        connection = HTTPConnection(self.address.host, self.address.port, timeout=seconds)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status not in good:
                raise BackendUnavailable(
                    f"admin port {self.address} of the Mooncake master: {path} is answered with "
                    f"HTTP {answer.status} {answer.reason}"
                )
            yield answer
        except (OSError, HTTPException, msgspec.MsgspecError) as error:
            if isinstance(error, BackendUnavailable):
                raise
            raise BackendUnavailable(
                f"admin port {self.address} of the Mooncake master does not answer: {error!r}"
            ) from error
        finally:
            connection.close()
