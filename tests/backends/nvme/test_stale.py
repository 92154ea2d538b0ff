"""What a call believes may be old when it acts on it: never does that cost another page."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from l3store.backends.nvme import backend as backend_module
from l3store.backends.nvme.segment import Segment
from l3store.errors import BackendUnavailable, CapacityError
from tests.backends.nvme._kit import PLACE, SEGMENT, SLOTS, opened, put, readable, some, spoil

FULL = 4 * SLOTS


@contextmanager
def once_before(owner, name, act):
    """Does something before the first call of a method."""
    original, left = getattr(owner, name), [act]

    def wrapped(*args, **kwargs):
        if left:
            left.pop()()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, original)


@pytest.fixture
def owner_and_peer(tmp_path):
    """A full store, and another process's view of it."""
    with (
        opened(tmp_path / "s", capacity=4 * SEGMENT, evict="lru") as owner,
        opened(tmp_path / "s") as peer,
    ):
        assert all(put(owner, some(FULL)))
        yield owner, peer


def all_is_well(*stores, pages):
    for store in stores:
        assert store.check_integrity() == []
        assert all(store.exists_each(pages.keys))
        assert all(readable(store, pages))


def test_a_page_that_took_the_place_of_one_a_peer_is_about_to_read_is_not_damaged(owner_and_peer):
    owner, peer = owner_and_peer
    old, new = some(FULL), some(FULL, seed=1)
    with once_before(peer._reader, "_read_all", lambda: put(owner, new)):
        assert not any(readable(peer, old))
    assert peer._reader.counts["damaged"] == 0
    assert peer._reader.counts["recycled"] == FULL
    all_is_well(owner, peer, pages=new)


def test_a_page_that_was_told_of_during_a_read_is_not_forgotten_after_it(owner_and_peer):
    owner, peer = owner_and_peer
    old, new = some(FULL), some(FULL, seed=1)

    def store_and_hear():
        put(owner, new)
        assert all(peer.exists_each(new.keys))

    with once_before(Segment, "read_slots", store_and_hear):
        readable(peer, old)
    assert peer._reader.counts["damaged"] == 0
    all_is_well(owner, peer, pages=new)


def test_delete_removes_no_page_but_the_one_it_names(owner_and_peer):
    owner, peer = owner_and_peer
    old, new = some(FULL), some(FULL, seed=1)
    with once_before(peer, "_delete", lambda: put(owner, new)):
        assert not any(peer.delete(old.keys))
    all_is_well(owner, peer, pages=new)


def test_headers_are_those_of_the_pages_that_were_asked_for(owner_and_peer):
    owner, peer = owner_and_peer
    old, new = some(FULL), some(FULL, seed=1)
    with once_before(backend_module, "stretches", lambda: put(owner, new)):
        assert not any(peer.headers(old.keys))
    assert all(peer.headers(new.keys))


def test_two_reads_that_see_one_damage_free_its_slot_once(tmp_path):
    with opened(tmp_path / "s") as store:
        pages = some()
        put(store, pages)
        spoil(store, pages.keys[3])
        together, read_all = threading.Barrier(2), store._reader._read_all

        def read_and_meet(*args):
            read_all(*args)
            together.wait(30)

        store._reader._read_all = read_and_meet
        threads = [threading.Thread(target=readable, args=(store, pages)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store._reader._read_all = read_all
        assert store.check_integrity() == []
        assert put(store, pages) == [True] * SLOTS
        all_is_well(store, pages=pages)


def test_two_places_of_one_call_do_not_take_each_others_slots(tmp_path):
    with opened(tmp_path / "s", capacity=4 * SEGMENT) as store:
        put(store, some(FULL - 6))
        kv, other = some(3, seed=1), some(3, seed=2, size=9000, place="kit-0/indexer/all")
        assert all(store.page_set(kv.keys + other.keys, kv.sealed() + other.sealed()))
        for pages in (kv, other):
            all_is_well(store, pages=pages)


@pytest.mark.parametrize("after", ["write_slots", "write_records"])
def test_a_segment_that_becomes_another_while_it_is_filled_holds_nothing(tmp_path, after):
    """Somebody removes its file, and a peer takes its number."""
    path = tmp_path / "s"
    with opened(path, capacity=4 * SEGMENT) as store, opened(path, writers=2) as peer:
        put(store, some(3))
        put(peer, some(3, seed=1))
        original, left = getattr(Segment, after), [1]

        def replaced(self, *args):
            result = original(self, *args)
            if left:
                left.pop()
                os.unlink(path / f"seg-{self.number:06d}")
                put(peer, some(40, seed=2))
                assert not any(store.exists_each(some(3).keys))
            return result

        setattr(Segment, after, replaced)
        try:
            with pytest.raises((BackendUnavailable, CapacityError)):
                put(store, some(3, seed=3))
        finally:
            setattr(Segment, after, original)
        assert not any(store.exists_each(some(3, seed=3).keys))
        assert store.check_integrity() == peer.check_integrity() == []


def test_check_integrity_finds_nothing_wrong_while_peers_delete(tmp_path):
    with opened(tmp_path / "s") as owner, opened(tmp_path / "s") as peer:
        pages = some()
        put(owner, pages)
        live, left = owner._catalog.live, [1]

        def live_after_a_delete(segment):
            if left:
                left.pop()
                assert all(peer.delete(pages.keys))
            return live(segment)

        owner._catalog.live = live_after_a_delete
        assert owner.check_integrity() == []


@pytest.mark.parametrize("calls", ["page_get", "page_set"])
def test_an_interrupted_call_has_let_go_of_the_callers_memory(tmp_path, calls):
    """Ctrl-C comes while the caller's thread waits for the others, and comes again."""
    with opened(tmp_path / "s", capacity=256 << 20, segment=32 << 20) as store:
        pages = some(24, size=1 << 20, place=PLACE)
        moving, main = [], threading.main_thread()
        name = "read_slots" if calls == "page_get" else "write_slots"
        move = getattr(Segment, name)
        if calls == "page_get":
            put(store, pages)
        sealed, room = pages.sealed(), pages.room()

        def slowly(self, *args):
            if threading.current_thread() is main:
                return move(self, *args)
            moving.append(1)
            time.sleep(0.4)
            try:
                return move(self, *args)
            finally:
                moving.pop()

        interrupts = [1, 1]

        def interrupt(*_):
            if interrupts:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                if moving:
                    interrupts.pop()
                    raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        setattr(Segment, name, slowly)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                getattr(store, calls)(pages.keys, room.pages if calls == "page_get" else sealed)
            assert not moving
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            setattr(Segment, name, move)
            signal.signal(signal.SIGALRM, before)
        assert store.check_integrity() == []
        assert all(put(store, pages))
        all_is_well(store, pages=pages)
