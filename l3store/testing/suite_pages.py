"""Promises 2, 3 and 4: what is read is what was stored, whatever was damaged meanwhile."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest
from xxhash import xxh3_64_intdigest

from l3store import page
from l3store.testing.kit import Pages, bare, promise
from l3store.testing.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.abc import Backend, Segments

__all__ = ["PageSuite"]


def _with(data: bytes, at: int, value: bytes, *, resum: bool = True) -> bytes:
    """Changes bytes of a stored page, and makes the header's own checksum hold again."""
    changed = bytearray(data)
    changed[at : at + len(value)] = value
    if resum:
        changed[120:128] = xxh3_64_intdigest(bytes(changed[:120])).to_bytes(8, "little")
    return bytes(changed)


def _flipped(data: bytes, at: int) -> bytes:
    return _with(data, at, bytes([data[at] ^ 4]), resum=False)


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a bit of the payload flipped": lambda good, other: _flipped(good, 200),
    "a bit of the header flipped": lambda good, other: _flipped(good, 70),
    "all zeros": lambda good, other: bytes(len(good)),
    "the second half zeros": lambda good, other: good[:2000] + bytes(len(good) - 2000),
    "truncated by one byte": lambda good, other: good[:-1],
    "truncated in the header": lambda good, other: good[:57],
    "empty": lambda good, other: b"",
    "one byte too long": lambda good, other: good + b"\0",
    "much too long": lambda good, other: good * 3,
    "the page of another key": lambda good, other: other,
    "wrong magic": lambda good, other: _with(good, 0, b"XXXX"),
    "a newer version": lambda good, other: _with(good, 4, b"\x09\x00"),
    "unknown flags": lambda good, other: _with(good, 6, b"\x00\x80"),
    "a length that is too small": lambda good, other: _with(good, 8, _u64(1)),
    "a length that is too large": lambda good, other: _with(good, 8, _u64(2**63)),
    "another place": lambda good, other: _with(good, 16, bytes(16)),
    "another page hash": lambda good, other: _with(good, 32, bytes(32)),
    "another payload checksum": lambda good, other: _with(good, 112, bytes(8)),
}
"""What may stand in a store in place of a good page, made from it and from another page."""


class PageSuite(Suite):
    """Tests of the bytes of pages."""

    # -- 2: True means every byte ----------------------------------------------------------

    @promise(2)
    @pytest.mark.parametrize("segments", [1, 2, 3, 16, 64, 72])
    @pytest.mark.parametrize(("size", "offset"), [(4096, 0), (4097, 1), (77, 3), (65536, 4032)])
    def test_every_byte_comes_back(
        self, either: Backend, segments: int, size: int, offset: int
    ) -> None:
        """One to 72 segments, odd sizes, unaligned buffers; written in another cut than read."""
        pages = Pages(count=5, size=size, segments=3)
        assert either.page_set(pages.keys, pages.sealed()) == [True] * 5
        pages.segments = segments
        room = pages.room(offset=offset)
        done = either.page_get(pages.keys, room.pages, page.opener(pages.keys))
        assert done == [True] * 5, "pages that were just set are not read"
        # Never `==` on pages in an assert: where CI is set pytest prints the whole difference.
        assert [i for i in range(5) if room.page(i) != pages.stored(i)] == [], "wrong bytes"
        assert room.intact(), "bytes outside the buffers were written"

    @promise(2)
    @pytest.mark.parametrize("change", [-4096, -1, +1, +4096])
    def test_a_stored_page_of_another_length_is_no_hit(self, raw: Backend, change: int) -> None:
        """Seen from the bare backend: the stored length must be exactly that of the buffers."""
        pages = Pages(count=2, size=8192)
        raw.page_set(pages.keys, pages.sealed())
        good = pages.stored(1)
        self.raw_write(raw, pages.keys[1], good[:change] if change < 0 else good + bytes(change))
        room = pages.room()
        assert raw.page_get(pages.keys, room.pages) == [True, False], (
            f"a page stored {change:+} bytes long was called read"
        )
        assert room.intact(), "bytes outside the buffers were written"

    @promise(2)
    def test_what_is_stored_is_header_and_payload(self, raw: Backend) -> None:
        """The helpers of this suite see the very bytes that were set."""
        pages = Pages(count=1, segments=4)
        raw.page_set(pages.keys, pages.sealed())
        same = self.raw_read(raw, pages.keys[0]) == pages.stored(0)
        assert same, "header and payload are not what `raw_read` finds"

    # -- 3: setting again, damage heals ----------------------------------------------------

    @promise(3)
    def test_setting_again_is_a_success_and_leaves_one_whole_page(self, either: Backend) -> None:
        """The old page or the new one: both are whole pages of the key."""
        pages, newer = Pages(count=3), Pages(count=3)
        newer.payloads = [bytes(reversed(data)) for data in newer.payloads]
        assert either.page_set(pages.keys, pages.sealed()) == [True] * 3
        assert either.page_set(pages.keys, newer.sealed()) == [True] * 3
        room = pages.room()
        assert either.page_get(pages.keys, room.pages, page.opener(pages.keys)) == [True] * 3
        for i in range(3):
            assert room.payload(i) in (pages.payloads[i], newer.payloads[i])

    @promise(3, 9)
    @pytest.mark.parametrize("damage", DAMAGE)
    def test_damage_is_a_miss_and_heals(self, store: Backend, damage: str) -> None:
        """Damaged behind the back: a miss, gone or replaceable, and whole again once set again."""
        pages, other = Pages(count=4), Pages(count=4, seed=1)
        store.page_set(pages.keys, pages.sealed())
        bad = DAMAGE[damage](pages.stored(2), other.stored(2))
        self.raw_write(bare(store), pages.keys[2], bad)
        room = pages.room()
        assert store.page_get(pages.keys, room.pages) == [True, True, False, True], (
            f"a page with {damage} was called read"
        )
        assert room.intact(), "bytes outside the buffers were written"
        if store.capabilities.delete:
            assert store.batch_exists(pages.keys) == 2, "a page seen damaged still is there"
        assert store.page_set(pages.keys, pages.sealed()) == [True] * 4
        assert store.page_get(pages.keys, room.pages) == [True] * 4, "the damage did not heal"
        assert not pages.wrong([True] * 4, room)

    @promise(3)
    def test_only_the_very_page_that_was_read_is_removed(self, raw: Backend) -> None:
        """`delete` with a header spares a page whose header is another."""
        self.needs("delete")
        pages = Pages(count=2)
        raw.page_set(pages.keys, pages.sealed())
        stale = _with(pages.stored(0), 104, (7).to_bytes(8, "little"))[:128]
        assert raw.delete(pages.keys, [stale, pages.stored(1)[:128]]) == [False, True]
        assert raw.exists_each(pages.keys) == [True, False]

    @promise(3)
    def test_what_replaced_a_damaged_page_meanwhile_stays(self, raw: Backend) -> None:
        """A backend that checks removes the page it read, not what stands there by then."""
        self.needs("checks", "delete")
        pages, newer = Pages(count=1), Pages(count=1)
        newer.payloads = [bytes(reversed(pages.payloads[0]))]
        raw.page_set(pages.keys, pages.sealed())
        time.sleep(0.05)  # longer than a tick of a file system's clock

        def check(i: int, segments: Segments) -> bool:
            self.raw_write(raw, pages.keys[0], newer.stored(0))
            return False

        assert raw.page_get(pages.keys, pages.room().pages, check) == [False]
        assert self.raw_read(raw, pages.keys[0]) == newer.stored(0)

    # -- 4: order, duplicates, prefix, batches ---------------------------------------------

    @promise(4)
    def test_the_prefix_ends_at_the_first_hole(self, either: Backend) -> None:
        """Holes at every set of positions of six pages."""
        pages = Pages(count=6, size=64)
        for i, present in enumerate(itertools.product((True, False), repeat=6)):
            pages = Pages(count=6, size=64, seed=i)
            sealed = pages.sealed()
            kept = [n for n, there in enumerate(present) if there]
            if kept:
                either.page_set([pages.keys[n] for n in kept], [sealed[n] for n in kept])
            run = next((n for n, there in enumerate(present) if not there), 6)
            assert either.batch_exists(pages.keys) == run, f"stored: {present}"
            assert either.exists_each(pages.keys) == list(present)

    @promise(4)
    def test_a_partial_batch_reads_what_is_there(self, either: Backend) -> None:
        """A hole does not end a `page_get`."""
        pages = Pages(count=7)
        sealed = pages.sealed()
        there = [0, 1, 3, 6]
        either.page_set([pages.keys[n] for n in there], [sealed[n] for n in there])
        room = pages.room()
        done = either.page_get(pages.keys, room.pages)
        assert done == [n in there for n in range(7)]
        assert not pages.wrong(done, room)

    @promise(4)
    def test_order_and_duplicates_are_honoured(self, either: Backend) -> None:
        """Each position is answered for itself, whatever stands at the others."""
        pages, absent = Pages(count=4), Pages(count=1, seed=9)
        order = [3, 0, 3, 3, 1, 2, 0]
        sealed = pages.sealed()
        keys = pages.keys
        assert either.page_set([keys[n] for n in order], [sealed[n] for n in order]) == [True] * 7
        room = Pages(count=7).room()
        asked = [keys[n] for n in order]
        assert either.page_get(asked, room.pages) == [True] * 7
        assert [i for i, n in enumerate(order) if room.payload(i) != pages.payloads[n]] == []
        assert either.batch_exists([keys[0], keys[0], keys[2], absent.keys[0], keys[1]]) == 3
        mixed = [keys[1], absent.keys[0], keys[1]]
        assert either.exists_each(mixed) == [True, False, True]
        assert either.page_get(mixed, room.pages[:3]) == [True, False, True]

    @promise(4)
    def test_an_empty_batch_is_a_no_op(self, either: Backend) -> None:
        """Nothing asked, nothing done."""
        assert either.batch_exists([]) == 0
        assert either.exists_each([]) == []
        assert either.page_get([], []) == []
        assert either.page_set([], []) == []

    @promise(4)
    def test_unequal_lengths_are_refused_and_nothing_is_stored(self, either: Backend) -> None:
        """`ValueError`, before anything is done."""
        pages = Pages(count=3)
        with pytest.raises(ValueError, match=r"3"):
            either.page_set(pages.keys, pages.sealed()[:2])
        with pytest.raises(ValueError, match=r"3"):
            either.page_get(pages.keys[:2], pages.room().pages)
        assert either.batch_exists(pages.keys) == 0

    @promise(4)
    def test_a_large_batch_is_one_call(self, either: Backend) -> None:
        """300 pages, more than any engine asks for at once."""
        pages = Pages(count=300, size=512)
        assert either.page_set(pages.keys, pages.sealed()) == [True] * 300
        assert either.batch_exists(pages.keys) == 300
        room = pages.room()
        assert either.page_get(pages.keys, room.pages) == [True] * 300
        assert not pages.wrong([True] * 300, room)

    @promise(4)
    @pytest.mark.parametrize("kind", [list, tuple])
    def test_lists_and_tuples_will_do_and_stay_as_they_are(
        self, either: Backend, kind: Callable[..., Any]
    ) -> None:
        """Keys, pages and buffers: lists or tuples, in no order, none of them changed."""
        pages, room = Pages(count=4), Pages(count=4).room()
        keys, sealed = kind(reversed(pages.keys)), kind(reversed(pages.sealed()))
        into, headers = kind(room.pages), kind([None] * 4)
        before = list(keys), list(sealed), list(into)
        assert either.page_set(keys, sealed) == [True] * 4
        assert either.batch_exists(keys) == 4
        assert either.exists_each(keys) == [True] * 4
        assert either.page_get(keys, into) == [True] * 4
        assert [room.payload(i) for i in range(4)] == pages.payloads[::-1]
        if either.capabilities.headers:
            assert None not in either.headers(keys)
        if either.capabilities.delete:
            assert either.delete(keys, headers) == [True] * 4
        assert (list(keys), list(sealed), list(into)) == before
