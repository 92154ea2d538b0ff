"""`Requests`: everything that is sent, in time, once more where that helps, with typed errors."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from l3store.backends.s3.answers import AGAIN, Failure
from l3store.backends.s3.crew import Lease, run
from l3store.calls import Gate, Workers
from l3store.errors import L3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from l3store.backends.s3.client import Stat
    from l3store.backends.s3.listing import Asked
    from l3store.backends.s3.opening import Connected
    from l3store.backends.s3.options import S3Options

__all__ = ["Requests"]

Result = TypeVar("Result")

_SMALL_ONES = 64  # threads for requests without a page
_AGAIN_AFTER = 0.02  # seconds until a request is sent again


class Requests:
    """The requests of one store. Thread-safe; every method blocks, at most to the deadline.

    Methods that take a `Lease` run on a worker and raise `Failure`; the others run in the caller's
    thread, inside `call`.

    Args:
        where: The store, for messages.
        connected: The ways to it.
        options: How many at once, and how often.
    """

    def __init__(self, where: str, connected: Connected, options: S3Options) -> None:
        self._where, self._options = where, options
        self.client, self.tools = connected.client, connected.tools
        self.conditions = options.if_none_match
        """Whether the server knows If-None-Match, as far as is known."""
        self._gate = Gate(f"s3 store {where}")
        self._movers = Workers(options.concurrency, "l3store-s3")
        self._others = Workers(_SMALL_ONES, "l3store-s3-small")

    @contextmanager
    def call(self, done: Sequence[bool] = (), *, opening: bool = False) -> Iterator[None]:
        """Surrounds a call of the contract: none after close, typed errors with what was done."""
        with self._gate:
            try:
                yield
            except Failure as failure:
                error = failure.typed(self._where, opening=opening)
                error.done = list(done)
                raise error from failure
            except L3Error as error:
                error.done = error.done or list(done)
                raise

    def close(self, seconds: float) -> None:
        """Lets no call in, waits for those that run, and frees everything. Idempotent."""
        if self._gate.shut(seconds):
            self._movers.stop()
            self._others.stop()
            self.tools.close()
            if self.client is not self.tools:
                self.client.close()

    # -- several at once, in the caller's thread -------------------------------------------

    def move(self, number: int, one: Callable[[int, Lease], bool]) -> None:
        """Calls `one` for each page. See `crew.run`."""
        run(self._movers, number, self._options.concurrency, one, self._where)

    def ask(self, number: int, one: Callable[[int, Lease], bool]) -> None:
        """Calls `one` for each of so many small requests. See `crew.run`."""
        run(self._others, number, _SMALL_ONES, one, self._where)

    def single(self, request: Callable[[Lease], Result]) -> Result:
        """Runs one request, and returns what it returns."""
        results: list[Result] = []

        def work(_: int, lease: Lease) -> bool:
            results.append(request(lease))
            return True

        self.ask(1, work)
        return results[0]

    def heads(self, names: Sequence[str], least: int, *, all_of_them: bool) -> list[bool]:
        """Returns whether each object is there: of all, or up to the first that is not.

        Args:
            names: Of objects.
            least: Bytes; a smaller object is none.
            all_of_them: Else it stops after the first that is not there.
        """
        found = [False] * len(names)

        def look(i: int, lease: Lease) -> bool:
            stat = self.stat(names[i], lease)
            found[i] = stat is not None and stat.size >= least
            return found[i] or all_of_them

        self.ask(len(names), look)
        return found

    def lists(self, asked: Sequence[Asked]) -> list[tuple[list[Stat], str]]:
        """Returns one part of each of several lists. A call of its own: a walk has many."""
        found: list[tuple[list[Stat], str]] = [([], "")] * len(asked)

        def look(i: int, lease: Lease) -> bool:
            found[i] = self.sent(lambda: self.tools.list(*asked[i]), lease)
            return True

        with self.call():
            self.ask(len(asked), look)
            return list(found)

    # -- one, on a worker ------------------------------------------------------------------

    def sent(self, request: Callable[[], Result], lease: Lease) -> Result:
        """Sends a request, and once more where that may help and there is time."""
        try:
            return request()
        except Failure as failure:
            if failure.kind not in AGAIN or not self._options.retries:
                raise
            if lease.left() <= _AGAIN_AFTER:
                raise
        time.sleep(_AGAIN_AFTER)
        return request()

    def stat(self, name: str, lease: Lease) -> Stat | None:
        """Looks at an object; None where there is none."""
        try:
            return self.sent(lambda: self.client.head(name), lease)
        except Failure as failure:
            if failure.kind != "absent":
                raise
            return None

    def start_of(self, name: str, limit: int, lease: Lease) -> bytes | None:
        """Returns the first `limit` bytes of an object, None where there is none."""
        try:
            return self.sent(lambda: self.client.read(name, limit), lease)
        except Failure as failure:
            if failure.kind == "absent":
                return None
            if failure.kind == "empty":
                return b""
            raise

    def put_small(self, name: str, data: bytes, lease: Lease, *, create: bool = False) -> None:
        """Stores a small object; with `create` what is there stays, if the server can do that."""
        pieces = [memoryview(data)]
        create = create and self.conditions
        try:
            self.sent(lambda: self.client.put(name, pieces, lease, create=create), lease)
        except Failure as failure:
            if not create or failure.kind not in ("there", "unsupported"):
                raise
            if failure.kind == "unsupported":
                self.client.put(name, pieces, lease, create=False)

    def delete_all(self, names: Sequence[str], lease: Lease) -> None:
        """Removes objects that are there or not."""
        self.sent(lambda: self.tools.delete_all(names), lease)
