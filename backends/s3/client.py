"""What the backend asks of a client library. All calls block, and raise `Failure` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.abc import Segments
    from l3store.backends.s3.crew import Lease

__all__ = ["Body", "Client", "Stat", "Tools"]


class Stat(NamedTuple):
    """An object that is there."""

    name: str
    size: int
    etag: str


class Body(Protocol):
    """An answer of which the head has arrived."""

    size: int

    def stat(self) -> Stat:
        """Returns what the head says; not for each page, it takes as long as a small body."""

    def into(self, segments: Segments, lease: Lease, check: Callable[[], bool] | None) -> bool:
        """Copies the body, which must be as long as `segments`; raises when it is cut short.

        Returns:
            What `check` says of the segments then.
        """

    def drop(self) -> None:
        """Reads no more of it."""


class Client(Protocol):
    """Moves objects. Thread-safe."""

    def head(self, name: str) -> Stat:
        """Looks whether an object is there."""

    def get(self, name: str) -> Body:
        """Asks for an object, and waits for its length."""

    def read(self, name: str, limit: int) -> bytes:
        """Returns the first `limit` bytes."""

    def put(self, name: str, pieces: Sequence[memoryview], lease: Lease, *, create: bool) -> None:
        """Stores an object; with `create` only where there is none."""

    def close(self) -> None:
        """Frees what it holds; no call is running."""


class Tools(Protocol):
    """What only tools and repairs ask for. Thread-safe."""

    def list(self, prefix: str, token: str) -> tuple[list[Stat], str]:
        """Returns up to 1,000 objects, and the token to go on with; "": those are all."""

    def delete(self, name: str, etag: str) -> None:
        """Removes an object if it still is that one, as far as the server can tell."""

    def delete_all(self, names: Sequence[str]) -> None:
        """Removes up to 1,000 objects, whether they are there or not."""

    def server(self, prefix: str) -> str:
        """Returns what the server calls itself, by a list of one object below `prefix`."""

    def close(self) -> None:
        """Frees what it holds; no call is running."""
