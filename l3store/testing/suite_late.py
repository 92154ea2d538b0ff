"""Promises 6 and 10: no call outlasts its deadline, and a late one touches nobody's memory."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from l3store import page, registry
from l3store.abc import call_deadline
from l3store.config import Duration, StackOptions
from l3store.errors import BackendTimeout, BackendUnavailable, L3Error
from l3store.testing.kit import Pages, promise
from l3store.testing.suite import Suite
from l3store.wrap._base import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from l3store.abc import Backend, Check, Segments

__all__ = ["LateSuite"]

Result = TypeVar("Result")

_DEADLINE = 0.2
_HANG = 30.0


class _Held(Wrapper):
    """The backend behind a door: every call waits before it does its work in full."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, interruptible=False)
        self.door, self.left = threading.Event(), threading.Event()

    def _through(self, call: Callable[[], Result]) -> Result:
        self.door.wait(_HANG)
        try:
            # In a thread of its own, where no deadline is set: the one that has passed at the door
            # is not for the backend to keep.
            with ThreadPoolExecutor(1) as own:
                return own.submit(call).result()
        finally:
            self.left.set()

    def batch_exists(self, keys: Sequence[str]) -> int:
        return self._through(lambda: self.inner.batch_exists(keys))

    def exists_each(self, keys: Sequence[str]) -> list[bool]:
        return self._through(lambda: self.inner.exists_each(keys))

    def page_get(
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        return self._through(lambda: self.inner.page_get(keys, into, check))

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:
        return self._through(lambda: self.inner.page_set(keys, pages))

    def get_meta(self, name: str) -> bytes | None:
        return self._through(lambda: self.inner.get_meta(name))

    def put_meta(self, name: str, data: bytes) -> None:
        self._through(lambda: self.inner.put_meta(name, data))

    def list_meta(self) -> list[str]:
        return self._through(self.inner.list_meta)

    def health(self) -> None:
        self._through(self.inner.health)


class LateSuite(Suite):
    """Tests of calls that hang, end late, or go on after they have returned."""

    @pytest.fixture
    def held(self, raw: Backend) -> Iterator[_Held]:
        """The backend behind a door that is shut; opened at the end."""
        held = _Held(raw)
        self._stacks: list[Backend] = []
        yield held
        held.door.set()
        for stack in self._stacks:
            stack.close()

    def _stack(self, held: _Held, late: str) -> Backend:
        options = StackOptions(deadline=Duration(_DEADLINE), late=late, breaker_failures=99)  # type: ignore[arg-type]
        return self._wrapped(held, options)

    def _wrapped(self, held: _Held, options: StackOptions) -> Backend:
        self._stacks.append(registry.stack(held, options, name="held"))
        return self._stacks[-1]

    # -- 6: deadlines ----------------------------------------------------------------------

    @promise(6)
    @pytest.mark.parametrize(
        "call",
        ["batch_exists", "exists_each", "page_get", "page_set", "get_meta", "put_meta",
         "list_meta", "health"],
    )  # fmt: skip
    def test_a_call_that_hangs_ends_at_its_deadline(self, held: _Held, call: str) -> None:
        """`BackendTimeout`, long before the call itself would end."""
        pages = Pages(count=2)
        arguments: dict[str, tuple[Any, ...]] = {
            "batch_exists": (pages.keys,), "exists_each": (pages.keys,),
            "page_get": (pages.keys, pages.room().pages), "page_set": (pages.keys, pages.sealed()),
            "get_meta": ("a",), "put_meta": ("a", b"x"),
        }  # fmt: skip
        start = time.monotonic()
        with pytest.raises(BackendTimeout):
            getattr(self._stack(held, "staged"), call)(*arguments.get(call, ()))
        assert time.monotonic() - start < _HANG / 2

    @promise(6)
    def test_an_interruptible_backend_ends_by_itself(self, raw: Backend) -> None:
        """With hardly any time left each call ends soon: done, or with a typed error."""
        self.needs("interruptible")
        pages = Pages()
        for call in (
            lambda: raw.batch_exists(pages.keys),
            lambda: raw.page_set(pages.keys, pages.sealed()),
            lambda: raw.page_get(pages.keys, pages.room().pages),
            lambda: raw.get_meta("a"),
            lambda: raw.health(),
        ):
            start = time.monotonic()
            with call_deadline(0.01), suppress(BackendTimeout, BackendUnavailable):
                call()
            assert time.monotonic() - start < 5

    @promise(6)
    def test_the_breaker_leaves_a_hanging_store_alone(self, held: _Held) -> None:
        """After a few late calls the next ones are refused at once, without a call."""
        options = StackOptions(
            deadline=Duration(0.05), late="staged", breaker_cooldown=Duration(60)
        )
        store = self._wrapped(held, options)
        for _ in range(3):
            with pytest.raises(BackendTimeout):
                store.batch_exists(Pages().keys)
        with pytest.raises(BackendUnavailable, match="breaker"):
            store.batch_exists(Pages().keys)

    # -- 10: nothing is touched after return -----------------------------------------------

    @promise(10)
    def test_a_returned_read_writes_no_more(self, either: Backend) -> None:
        """Buffers that were reused right after return keep what their owner put there."""
        pages = Pages(count=64, size=32768)
        either.page_set(pages.keys, pages.sealed())
        room = pages.room()
        for _ in range(5):
            either.page_get(pages.keys, room.pages)
            room.reuse()
            time.sleep(0.01)
            assert room.untouched(), "memory was written after the call had returned"

    @promise(10)
    def test_staged_a_late_read_reaches_nobody(self, held: _Held) -> None:
        """At the deadline the caller gets its memory back, and it stays as it is."""
        pages = Pages()
        held.inner.page_set(pages.keys, pages.sealed())
        room = pages.room()
        with pytest.raises(BackendTimeout) as caught:
            self._stack(held, "staged").page_get(pages.keys, room.pages)
        assert caught.value.pending is None
        held.door.set()
        assert held.left.wait(_HANG)
        time.sleep(0.05)
        assert room.untouched(), "a late call wrote into memory that its caller may reuse"

    @promise(10)
    def test_staged_a_late_write_stores_no_foreign_bytes(self, held: _Held) -> None:
        """The caller reuses the page at the deadline; the late call stores the page as it was."""
        pages = Pages()
        sealed = pages.sealed()
        with pytest.raises(BackendTimeout):
            self._stack(held, "staged").page_set(pages.keys, sealed)
        for segments in sealed:
            for piece in segments:
                piece[:] = bytes(piece.nbytes)
        held.door.set()
        assert held.left.wait(_HANG)
        room = pages.room()
        done = held.inner.page_get(pages.keys, room.pages, page.opener(pages.keys))
        assert not pages.wrong(done, room)
        assert all(done)

    @promise(10)
    def test_pending_tells_when_the_memory_is_free(self, held: _Held) -> None:
        """Until `.pending` is done the memory belongs to the call, afterwards to the caller."""
        pages = Pages()
        held.inner.page_set(pages.keys, pages.sealed())
        room = pages.room()
        with pytest.raises(BackendTimeout) as caught:
            self._stack(held, "pending").page_get(pages.keys, room.pages)
        assert caught.value.pending is not None
        assert not caught.value.pending.done()
        held.door.set()
        assert caught.value.pending.result(_HANG) == [True] * 8
        room.reuse()
        time.sleep(0.05)
        assert room.untouched()

    @promise(10)
    def test_wait_does_not_return_before_the_call(self, held: _Held) -> None:
        """And meanwhile the breaker refuses further calls."""
        pages = Pages()
        held.inner.page_set(pages.keys, pages.sealed())
        store, room = self._stack(held, "wait"), pages.room()
        caught: list[L3Error] = []

        def read() -> None:
            with pytest.raises(BackendTimeout) as error:
                store.page_get(pages.keys, room.pages)
            room.reuse()
            caught.append(error.value)

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(2 * _DEADLINE)
        assert reader.is_alive(), "the call was left while it worked on the caller's memory"
        with pytest.raises(BackendUnavailable):
            store.page_get(pages.keys, pages.room().pages)
        held.door.set()
        reader.join(_HANG)
        assert caught[0].done == [True] * 8
        time.sleep(0.05)
        assert room.untouched()
