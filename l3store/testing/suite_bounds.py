"""Promises 6, 7, 8, 10 and 11: deadlines, errors, memory, late calls, a full store."""

from __future__ import annotations

import threading
import time
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from l3store import page, registry
from l3store.abc import call_deadline
from l3store.config import Duration, StackOptions
from l3store.errors import BackendTimeout, BackendUnavailable, CapacityError, L3Error
from l3store.testing.kit import PLACE, Pages, promise
from l3store.testing.suite import Suite
from l3store.wrap._base import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from l3store.abc import Backend, Check, Segments

__all__ = ["BoundsSuite"]

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
            return call()
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


class BoundsSuite(Suite):
    """Tests of what happens when things go wrong."""

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

    # -- 7: misses and errors --------------------------------------------------------------

    @promise(7)
    def test_absent_is_a_plain_miss(self, either: Backend) -> None:
        """No error, no hit, and the buffers' neighbours are intact."""
        pages = Pages()
        room = pages.room()
        assert either.batch_exists(pages.keys) == 0
        assert either.exists_each(pages.keys) == [False] * 8
        assert either.page_get(pages.keys, room.pages) == [False] * 8
        assert either.get_meta(PLACE) is None
        assert either.list_meta() == []
        assert room.intact()
        if either.capabilities.delete:
            assert either.delete(pages.keys) == [False] * 8
        if either.capabilities.headers:
            assert either.headers(pages.keys) == [None] * 8

    @promise(7)
    def test_an_unreachable_store_is_a_typed_error_and_comes_back(self, raw: Backend) -> None:
        """Never a miss, never a bare vendor error; afterwards all works without reopening."""
        self.needs("shared")
        pages, fresh = Pages(), Pages(seed=1)
        raw.page_set(pages.keys, pages.sealed())
        raw.put_meta("conformance-0", b"x")
        room = pages.room()
        with self.unreachable(raw):
            for call in (
                lambda: raw.batch_exists(pages.keys),
                lambda: raw.page_get(pages.keys, room.pages),
                lambda: raw.page_set(fresh.keys, fresh.sealed()),
                lambda: raw.health(),
            ):
                with pytest.raises(L3Error) as caught:
                    call()
                assert isinstance(caught.value, BackendUnavailable | BackendTimeout)
                assert not any(caught.value.done), "nothing was done"
        assert raw.batch_exists(pages.keys) == 8
        assert raw.page_get(pages.keys, room.pages) == [True] * 8
        assert raw.page_set(fresh.keys, fresh.sealed()) == [True] * 8
        raw.health()

    @promise(7)
    def test_a_healthy_store_says_so(self, either: Backend) -> None:
        """And leaves nothing behind that is listed."""
        either.health()
        assert either.list_meta() == []
        if either.capabilities.listing:
            assert list(either.scan()) == []

    # -- 8: memory -------------------------------------------------------------------------

    @promise(8)
    def test_a_large_read_allocates_little(self, either: Backend) -> None:
        """192 pages of 1 MiB into the caller's buffers: at most 64 MiB beside them."""
        one = Pages(count=1, size=1 << 20)
        either.page_set(one.keys, one.sealed())
        shared = one.room()  # the same buffer 192 times: their number is what counts
        into = [shared.pages[0]] * 192
        tracemalloc.start()
        try:
            assert either.page_get(one.keys * 192, into) == [True] * 192
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= 64 << 20, f"{peak >> 20} MiB were allocated"

    @promise(8)
    def test_pages_are_not_kept_by_reference(self, either: Backend) -> None:
        """The caller reuses its buffers as soon as `page_set` has returned."""
        pages = Pages()
        sealed = pages.sealed()
        either.page_set(pages.keys, sealed)
        for segments in sealed:
            for piece in segments:
                piece[:] = bytes(piece.nbytes)
        room = pages.room()
        assert either.page_get(pages.keys, room.pages, page.opener(pages.keys)) == [True] * 8
        assert not pages.wrong([True] * 8, room)

    @promise(8)
    def test_pages_that_are_set_are_not_changed(self, either: Backend) -> None:
        """Neither headers nor payloads; they may be read-only memory."""
        pages = Pages()
        frozen = [tuple(piece.toreadonly() for piece in segments) for segments in pages.sealed()]
        assert either.page_set(pages.keys, frozen) == [True] * 8
        changed = [i for i, page in enumerate(frozen) if b"".join(page) != pages.stored(i)]
        assert changed == [], "page_set wrote into the caller's pages"

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

    # -- 11: full --------------------------------------------------------------------------

    @promise(11)
    def test_a_full_store_tells_exactly_what_it_took(self, tmp_path: Path) -> None:
        """True is there and right, False is not there; an error only when nothing was taken."""
        size, fits = 60_000, 12
        url = self.small_url(tmp_path, size + page.HEADER_BYTES, fits)
        with registry.open(url) as store:
            taken: list[tuple[Pages, list[bool]]] = []
            for seed in range(8):
                pages = Pages(count=6, size=size, seed=seed)
                try:
                    done = store.page_set(pages.keys, pages.sealed())
                    assert any(done), "nothing was stored, and no CapacityError was raised"
                except CapacityError as error:
                    done = error.done
                    assert done == [False] * 6, "CapacityError is for when nothing was stored"
                taken.append((pages, done))
            stored = sum(sum(done) for _, done in taken)
            assert 1 <= stored < 2 * fits, f"{stored} pages in a store of {fits}"
            for pages, done in taken:
                assert store.exists_each(pages.keys) == done
                room = pages.room()
                read = store.page_get(pages.keys, room.pages)
                assert read == done, "what was said to be stored is not there"
                assert not pages.wrong(read, room)

    @promise(11)
    def test_a_full_store_still_reads_and_takes_what_it_has(self, tmp_path: Path) -> None:
        """Setting a stored page again is a success, also where there is no room."""
        size = 60_000
        url = self.small_url(tmp_path, size + page.HEADER_BYTES, 4)
        with registry.open(url) as store:
            pages = Pages(count=9, size=size)
            try:
                done = store.page_set(pages.keys, pages.sealed())
            except CapacityError as error:
                done = error.done
            kept = [i for i, good in enumerate(done) if good]
            assert 1 <= len(kept) < 9
            again = store.page_set([pages.keys[i] for i in kept], [pages.sealed()[i] for i in kept])
            assert again == [True] * len(kept)
            if store.capabilities.delete:
                store.delete([pages.keys[i] for i in kept])
                assert store.page_set(pages.keys[:1], pages.sealed()[:1]) == [True], "no room again"
