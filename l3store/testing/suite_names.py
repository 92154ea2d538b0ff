"""Promise 12: names, lengths, descriptors, listing, and the end of a store's life."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from l3store import page, registry
from l3store.abc import META_MAX_BYTES
from l3store.errors import BackendUnavailable
from l3store.testing.kit import PLACE, Pages, promise
from l3store.testing.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.abc import Backend

__all__ = ["NamesSuite"]

_OPTIONAL: dict[str, tuple[str, Callable[[Backend], object]]] = {
    "scan": ("listing", lambda b: b.scan()),
    "usage": ("listing", lambda b: b.usage()),
    "delete": ("delete", lambda b: b.delete(Pages().keys)),
    "headers": ("headers", lambda b: b.headers(Pages().keys)),
    "register_buffer": ("registration", lambda b: b.register_buffer(memoryview(bytearray(64)))),
}


class NamesSuite(Suite):
    """Tests of everything beside the data path."""

    # -- lengths ---------------------------------------------------------------------------

    @promise(12)
    def test_all_pages_of_a_place_have_one_length(self, either: Backend) -> None:
        """Another one is refused, in one batch and in a later one, and stores nothing."""
        pages, longer = Pages(count=2), Pages(count=2, size=4097, seed=1)
        mixed = [pages.sealed()[0], longer.sealed()[1]]
        with pytest.raises(ValueError, match=r"length|bytes"):
            either.page_set([pages.keys[0], longer.keys[1]], mixed)
        assert either.exists_each([pages.keys[0], longer.keys[1]]) == [False, False]
        assert either.page_set(pages.keys, pages.sealed()) == [True, True]
        with pytest.raises(ValueError, match=r"length|bytes"):
            either.page_set(longer.keys, longer.sealed())
        assert either.batch_exists(longer.keys) == 0

    @promise(12)
    def test_a_refused_batch_leaves_no_length_behind(self, either: Backend) -> None:
        """Of two places one has another length: the other one, still empty, may have any."""
        known, fresh = Pages(count=1, size=100), Pages(count=1, size=300, place="c/kv/all")
        either.page_set(known.keys, known.sealed())
        wrong = Pages(count=1, size=200)
        with pytest.raises(ValueError, match=r"length|bytes"):
            either.page_set(fresh.keys + wrong.keys, fresh.sealed() + wrong.sealed())
        assert either.exists_each(fresh.keys) == [False]
        other = Pages(count=1, size=400, place=fresh.place)
        assert either.page_set(other.keys, other.sealed()) == [True]

    @promise(12)
    def test_reading_with_another_length_is_refused_and_harms_nothing(
        self, either: Backend
    ) -> None:
        """The caller's mistake, not damage: the page stays."""
        pages = Pages(count=2)
        either.page_set(pages.keys, pages.sealed())
        for size in (4095, 4097, 8192):
            room = Pages(count=2, size=size).room()
            with pytest.raises(ValueError, match=r"length|bytes"):
                either.page_get(pages.keys, room.pages)
            assert room.untouched()
        assert either.batch_exists(pages.keys) == 2

    @promise(12)
    def test_other_places_have_lengths_of_their_own(self, either: Backend) -> None:
        """One batch may hold pages of two places."""
        one, two = Pages(count=1, size=100), Pages(count=1, size=200, place="c/indexer/all")
        keys = one.keys + two.keys
        assert either.page_set(keys, one.sealed() + two.sealed()) == [True, True]
        rooms = one.room(), two.room()
        assert either.page_get(keys, [*rooms[0].pages, *rooms[1].pages]) == [True, True]
        assert not one.wrong([True], rooms[0])
        assert not two.wrong([True], rooms[1])

    @promise(12)
    def test_limits_are_value_errors(self, raw: Backend) -> None:
        """A page or batch above the declared limits, where they can be reached here."""
        limits = raw.capabilities
        if limits.max_batch < 100_000:
            keys = Pages(count=1).keys * (limits.max_batch + 1)
            with pytest.raises(ValueError, match=str(limits.max_batch)):
                raw.batch_exists(keys)
        if limits.max_page_bytes < 64 << 20:
            large = Pages(count=1, size=limits.max_page_bytes + 1)
            with pytest.raises(ValueError, match=str(limits.max_page_bytes)):
                raw.page_set(large.keys, large.sealed())

    # -- descriptors -----------------------------------------------------------------------

    @promise(12)
    def test_descriptors_are_kept_replaced_and_listed(self, either: Backend) -> None:
        """Under a namespace and under a place; pages and descriptors do not meet."""
        either.put_meta("conformance-0", b"first")
        either.put_meta("conformance-0", b"second, longer than the first")
        either.put_meta("conformance-0", b"third")
        either.put_meta(PLACE, b"")
        assert either.get_meta("conformance-0") == b"third"
        assert either.get_meta(PLACE) == b""
        assert either.list_meta() == sorted(["conformance-0", PLACE])
        assert either.batch_exists(Pages().keys) == 0

    @promise(12)
    def test_a_descriptor_has_at_most_64_kib(self, either: Backend) -> None:
        """The largest is kept whole; one byte more is refused and the old one stays."""
        largest = bytes(range(256)) * 256
        assert len(largest) == META_MAX_BYTES
        either.put_meta("conformance-0", largest)
        with pytest.raises(ValueError, match="65537"):
            either.put_meta("conformance-0", largest + b"x")
        whole = either.get_meta("conformance-0") == largest
        assert whole, "the largest descriptor did not come back"

    @promise(12)
    def test_replacing_a_descriptor_is_atomic(self, raw: Backend) -> None:
        """A reader sees one of the two, never a mixture, an empty one or none."""
        one, two = b"1" * 60_000, b"2" * 30_000
        raw.put_meta("conformance-0", one)
        stop, seen = threading.Event(), set()

        def read() -> None:
            while not stop.is_set():
                seen.add(raw.get_meta("conformance-0"))

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(150):
            raw.put_meta("conformance-0", two)
            raw.put_meta("conformance-0", one)
        stop.set()
        reader.join(10)
        assert seen <= {one, two}, f"lengths seen: {[x and len(x) for x in seen]}"

    # -- listing, headers, delete ----------------------------------------------------------

    @promise(12)
    def test_scan_and_usage_tell_what_is_stored(self, either: Backend) -> None:
        """All keys once, by place; numbers that add up."""
        self.needs("listing")
        one, two = Pages(count=5), Pages(count=3, size=1000, place="other-1/indexer/all")
        near = Pages(count=2, place=f"{PLACE}4")  # its name begins as the other one does
        for pages in (one, two, near):
            either.page_set(pages.keys, pages.sealed())
        either.put_meta("conformance-0", b"not a page")
        assert sorted(either.scan()) == sorted(one.keys + two.keys + near.keys)
        assert sorted(either.scan(PLACE)) == sorted(one.keys)
        assert sorted(either.scan(near.place)) == sorted(near.keys)
        assert list(either.scan("other-1/kv/all")) == []
        found = {usage.place: usage for usage in either.usage()}
        assert sorted(found) == [PLACE, near.place, "other-1/indexer/all"]
        assert (found[PLACE].pages, found[PLACE].payload_bytes) == (5, 5 * 4096)
        assert found["other-1/indexer/all"].payload_bytes == 3000
        assert all(u.stored_bytes >= u.payload_bytes + 128 * u.pages for u in found.values())

    @promise(12)
    def test_headers_are_those_of_the_pages(self, either: Backend) -> None:
        """None where absent."""
        self.needs("headers")
        pages = Pages(count=3)
        either.page_set(pages.keys[:2], pages.sealed()[:2])
        found = either.headers(pages.keys)
        assert found == [pages.stored(0)[:128], pages.stored(1)[:128], None]
        assert page.parse(found[1] or b"").parent == pages.chain.hashes[0]

    @promise(12)
    def test_delete_removes_those_pages_and_no_others(self, either: Backend) -> None:
        """And says which there were."""
        self.needs("delete")
        pages = Pages(count=4)
        either.page_set(pages.keys[:3], pages.sealed()[:3])
        asked = [pages.keys[1], pages.keys[3]]
        assert either.delete(asked) == [True, False]
        assert either.exists_each(pages.keys) == [True, False, True, False]
        assert either.page_get(pages.keys, pages.room().pages) == [True, False, True, False]
        with pytest.raises(ValueError, match="2"):
            either.delete(asked, [None])
        wanted = [pages.stored(0)[:128], None]
        assert either.delete([pages.keys[0], pages.keys[2]], wanted) == [True, True]

    @promise(12)
    @pytest.mark.parametrize("method", _OPTIONAL)
    def test_what_is_not_declared_is_refused_by_name(self, either: Backend, method: str) -> None:
        """`NotImplementedError` that names the capability; what is declared works."""
        capability, call = _OPTIONAL[method]
        if getattr(either.capabilities, capability):
            call(either)
        else:
            with pytest.raises(NotImplementedError, match=capability):
                call(either)

    # -- close -----------------------------------------------------------------------------

    @promise(12)
    @pytest.mark.parametrize("bare", [True, False])
    def test_after_close_calls_are_refused(self, store_url: str, bare: bool) -> None:
        """`BackendUnavailable`; closing twice is closing once."""
        store, pages = registry.open(store_url, raw=bare), Pages()
        store.page_set(pages.keys, pages.sealed())
        store.close()
        store.close()
        for call in (
            lambda: store.batch_exists(pages.keys),
            lambda: store.exists_each(pages.keys),
            lambda: store.page_get(pages.keys, pages.room().pages),
            lambda: store.page_set(pages.keys, pages.sealed()),
            lambda: store.get_meta("a"),
            lambda: store.put_meta("a", b"x"),
            lambda: store.list_meta(),
            lambda: store.health(),
        ):
            with pytest.raises(BackendUnavailable):
                call()

    @promise(12)
    def test_close_waits_for_running_calls(self, store_url: str) -> None:
        """Calls that run while another thread closes end well or are refused: nothing between."""
        for seed in range(5):
            store, odd = registry.open(store_url, raw=True), list[str]()
            going, stop = threading.Event(), threading.Event()
            worker = threading.Thread(target=_use, args=(store, seed, odd, going, stop))
            worker.start()
            assert going.wait(10)
            store.close()
            worker.join(2)
            served_on = worker.is_alive()
            stop.set()
            worker.join(10)
            assert not served_on, "calls are served after close"
            assert not odd


def _use(
    store: Backend, seed: int, odd: list[str], going: threading.Event, stop: threading.Event
) -> None:
    """Sets and reads until the store refuses; `odd` collects what should not be."""
    pages = Pages(count=64, size=16384, seed=seed)
    sealed = pages.sealed()
    try:
        while not stop.is_set():
            done = store.page_set(pages.keys, sealed)
            going.set()
            if not all(done):
                odd.append(f"set {done}")
            room = pages.room()
            if pages.wrong(store.page_get(pages.keys, room.pages), room):
                odd.append("wrong bytes")
    except BackendUnavailable:
        pass
    except Exception as error:
        odd.append(repr(error))
    finally:
        going.set()
