"""Promises 7, 8 and 11: misses and errors, memory, a store that is full or cut off."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from l3store import page, registry
from l3store.errors import BackendTimeout, BackendUnavailable, CapacityError, L3Error
from l3store.testing.kit import PLACE, Pages, promise
from l3store.testing.suite import Suite

if TYPE_CHECKING:
    from pathlib import Path

    from l3store.abc import Backend

__all__ = ["BoundsSuite"]


class BoundsSuite(Suite):
    """Tests of what happens when things go wrong."""

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

    @promise(7, 10)
    def test_an_unreachable_store_is_a_typed_error_and_comes_back(self, raw: Backend) -> None:
        """Never a miss, never a bare vendor error; afterwards all works without reopening."""
        self.needs("shared")
        pages, fresh = Pages(), Pages(seed=1)
        raw.page_set(pages.keys, pages.sealed())
        raw.put_meta("conformance-0", b"x")
        room = pages.room()
        calls: list[Callable[[], object]] = [
            lambda: raw.page_get(pages.keys, room.pages),
            lambda: raw.batch_exists(pages.keys),
            lambda: raw.exists_each(pages.keys),
            lambda: raw.page_set(fresh.keys, fresh.sealed()),
            lambda: raw.health(),
        ]
        if raw.capabilities.headers:
            calls.append(lambda: raw.headers(pages.keys))
        if raw.capabilities.delete:
            calls.append(lambda: raw.delete(pages.keys))
        if raw.capabilities.listing:
            calls += [lambda: list(raw.scan()), lambda: list(raw.scan(PLACE)), lambda: raw.usage()]
        with self.unreachable(raw):
            for call in calls:
                with pytest.raises(L3Error) as caught:
                    call()
                assert isinstance(caught.value, BackendUnavailable | BackendTimeout)
                assert not any(caught.value.done), "nothing was done"
            room.reuse()
            with suppress(BackendUnavailable, BackendTimeout):  # descriptors may stand elsewhere
                assert raw.get_meta("conformance-0") == b"x"
                assert raw.list_meta() == ["conformance-0"]
        time.sleep(0.05)
        assert room.untouched(), "memory was written after the call had raised"
        assert raw.batch_exists(pages.keys) == 8
        assert raw.page_get(pages.keys, room.pages) == [True] * 8
        assert raw.page_set(fresh.keys, fresh.sealed()) == [True] * 8
        raw.health()

    @promise(11)
    @pytest.mark.parametrize("at", [0, 10, 50, 90])
    def test_a_store_lost_inside_page_set_tells_what_is_stored(self, raw: Backend, at: int) -> None:
        """Cut off when page `at` of 400 has arrived: True, also in `.done`, is there afterwards."""
        self.needs("shared")
        pages, told = Pages(count=400, size=8192), list[Sequence[bool]]()
        before, sealed = Pages(count=1, size=8192, seed=1), pages.sealed()
        raw.page_set(before.keys, before.sealed())

        def write() -> None:
            try:
                told.append(raw.page_set(pages.keys, sealed))
            except (BackendUnavailable, BackendTimeout) as error:
                told.append(error.done or [False] * 400)

        writer = threading.Thread(target=write)
        writer.start()
        while writer.is_alive() and self.raw_read(raw, pages.keys[at]) is None:
            time.sleep(0.0005)
        with self.unreachable(raw):
            writer.join(60)
            assert not writer.is_alive(), "page_set hangs on a store that went away"
        assert told, "page_set raised another error than a typed one"
        (done,) = told
        assert len(done) == 400, f"`.done` has {len(done)} answers for 400 keys"
        room, there = pages.room(), raw.exists_each(pages.keys)
        read = raw.page_get(pages.keys, room.pages, page.opener(pages.keys))
        lost = [i for i in range(400) if done[i] and not read[i]]
        assert not lost, f"{len(lost)} pages were called stored and are not, first page {lost[0]}"
        assert there == read, "a page that exists is not readable"
        assert not pages.wrong(read, room)

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

    @promise(8)
    def test_a_large_write_allocates_little(self, either: Backend) -> None:
        """One page of 1 MiB, 192 times in a call: at most 64 MiB beside it."""
        one = Pages(count=1, size=1 << 20, segments=2)
        sealed = one.sealed() * 192
        tracemalloc.start()
        try:
            assert either.page_set(one.keys * 192, sealed) == [True] * 192
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= 64 << 20, f"{peak >> 20} MiB were allocated"

    @promise(8)
    def test_a_call_holds_on_to_no_memory(self, either: Backend) -> None:
        """After return the caller may free its pages: nobody refers to them."""
        pages = Pages()
        sealed, into = pages.sealed(), pages.room().pages
        held = [weakref.ref(piece) for segments in (*sealed, *into) for piece in segments]
        either.page_set(pages.keys, sealed)
        either.page_get(pages.keys, into)
        del sealed, into
        until = time.monotonic() + 2  # a worker may be about to let go
        while any(ref() is not None for ref in held) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        assert not any(ref() is not None for ref in held), "the caller's memory is held"

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
                taken.append((pages, _taken(store, pages)))
                self._as_told(store, *taken[-1])
            stored = sum(sum(store.exists_each(pages.keys)) for pages, _ in taken)
            assert 1 <= stored < 2 * fits, f"{stored} pages are stored where {fits} fit"
            for pages, done in taken:
                self._as_told(store, pages, done, later=True)

    @promise(11)
    def test_a_batch_larger_than_the_store_is_told_page_by_page(self, tmp_path: Path) -> None:
        """What the batch itself pushed out again is not stored, and is not called so."""
        size, fits = 60_000, 4
        url = self.small_url(tmp_path, size + page.HEADER_BYTES, fits)
        with registry.open(url) as store:
            pages = Pages(count=9, size=size)
            done = _taken(store, pages)
            assert 1 <= sum(done) < 9, f"{sum(done)} of 9 pages stored where {fits} fit"
            self._as_told(store, pages, done)
            # Setting a stored page again is a success, also where there is no room.
            kept = [i for i, good in enumerate(done) if good]
            again = store.page_set([pages.keys[i] for i in kept], [pages.sealed()[i] for i in kept])
            assert again == [True] * len(kept)
            mixed = store.page_set(pages.keys, pages.sealed())  # and no error: some are stored
            assert mixed == store.exists_each(pages.keys)
            assert all(mixed[i] for i in kept)
            if store.capabilities.delete:
                store.delete([pages.keys[i] for i in kept])
                assert store.page_set(pages.keys[:1], pages.sealed()[:1]) == [True], "no room again"

    def _as_told(
        self, store: Backend, pages: Pages, done: list[bool], *, later: bool = False
    ) -> None:
        """Is there what `page_set` said? Later a store that evicts may have dropped some of it."""
        there, room = store.exists_each(pages.keys), pages.room()
        read = store.page_get(pages.keys, room.pages)
        assert read == there, "what exists is not read, or what is read does not exist"
        assert not pages.wrong(read, room)
        if later and self.evicts:
            assert not [i for i in range(len(done)) if read[i] and not done[i]]
        else:
            assert read == done, "`page_set` said otherwise about what is stored"


def _taken(store: Backend, pages: Pages) -> list[bool]:
    """What a `page_set` says that it took, checked against how it says so."""
    try:
        done = store.page_set(pages.keys, pages.sealed())
    except CapacityError as error:
        told = error.done
    else:
        assert any(done), "nothing was stored, and no CapacityError was raised"
        return done
    assert told == [False] * pages.count, "CapacityError is for when nothing was stored"
    return told
