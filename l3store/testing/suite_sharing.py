"""Promises 1 and 5: a page is whole or absent, for threads, processes, and after a kill."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from l3store import page, registry
from l3store.errors import BackendUnavailable
from l3store.testing.kit import Pages, promise, second_process
from l3store.testing.plugin import LacksCapability
from l3store.testing.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.abc import Backend

__all__ = ["SharingSuite"]

_WRITE_FOREVER = """
i = 0
say("ready")
while True:
    pages = Pages(count=16, size=65536, seed=i)
    store.page_set(pages.keys, pages.sealed())
    say("stored", i)
    i += 1
"""


class SharingSuite(Suite):
    """Tests with several threads and processes."""

    # -- 1: whole or not at all ------------------------------------------------------------

    @promise(1)
    def test_a_page_is_not_visible_before_it_is_whole(self, raw: Backend) -> None:
        """A reader that sees the key at once sees the whole page."""
        rounds = [Pages(count=1, size=1 << 20, seed=i) for i in range(40)]
        seen: list[str] = []
        writing = threading.Event()

        def write() -> None:
            for pages in rounds:
                writing.wait(5)
                writing.clear()
                raw.page_set(pages.keys, pages.sealed())

        writer = threading.Thread(target=write)
        writer.start()
        for pages in rounds:
            room, until = pages.room(), time.monotonic() + 10
            writing.set()
            while time.monotonic() < until:
                if raw.batch_exists(pages.keys):
                    stored = self.raw_read(raw, pages.keys[0])
                    if stored is None or len(stored) != len(pages.stored(0)):
                        seen.append(f"{None if stored is None else len(stored)} bytes")
                    if raw.page_get(pages.keys, room.pages) != [True]:
                        seen.append("not readable")
                    elif pages.wrong([True], room):
                        seen.append("wrong bytes")
                    break
            else:
                seen.append("never visible")
        writer.join(10)
        assert not seen, f"a visible page was not whole: {seen}"

    @promise(1)
    def test_a_page_that_is_set_again_stays_whole_meanwhile(self, raw: Backend) -> None:
        """A reader sees the old page or the new one, never a cut one and never none."""
        pages = Pages(count=1, size=1 << 20)
        raw.page_set(pages.keys, pages.sealed())

        def write() -> None:
            for _ in range(100):
                raw.page_set(pages.keys, pages.sealed())

        writer, room = threading.Thread(target=write), pages.room()
        writer.start()
        reads: list[bool] = []
        while writer.is_alive():
            done = raw.page_get(pages.keys, room.pages)
            reads.append(done == [True] and not pages.wrong(done, room))
        writer.join(10)
        assert all(reads), f"{reads.count(False)} of {len(reads)} reads saw no whole page"

    @promise(1)
    @pytest.mark.parametrize("round_", range(6))
    def test_a_killed_writer_leaves_whole_pages_or_none(self, store_url: str, round_: int) -> None:
        """Kill -9 inside `page_set`: the acknowledged is there, the rest whole or absent."""
        with registry.open(store_url) as store:
            self._capabilities = store.capabilities
            self.needs("durable", "shared")
        with second_process(store_url, _WRITE_FOREVER) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            for _ in range(1 + round_):
                writer.stdout.readline()
            time.sleep(0.0007 * (1 + round_))  # somewhere inside the next call
            writer.kill()
            said = writer.stdout.read().split()
        acknowledged = 1 + round_ + said.count("stored")
        with registry.open(store_url) as store:
            for i in range(acknowledged + 2):
                pages = Pages(count=16, size=65536, seed=i)
                room, there = pages.room(), store.exists_each(pages.keys)
                done = store.page_get(pages.keys, room.pages)
                assert done == there, "a page that exists is not whole after the kill"
                assert not pages.wrong(done, room)
                if i < acknowledged:
                    assert all(done), f"batch {i} was acknowledged and is lost"
            again = Pages(count=16, size=65536, seed=acknowledged)
            assert all(store.page_set(again.keys, again.sealed())), "the store does not go on"

    # -- 5: threads and processes ----------------------------------------------------------

    @promise(5)
    def test_threads_share_a_store(self, either: Backend) -> None:
        """Six threads set, read, and ask, each its own pages and all of them some common ones."""
        common = Pages(count=4, size=8192, seed=999)
        faults: list[str] = []

        def work(number: int) -> None:
            for i in range(12):
                mine = Pages(count=4, size=8192, seed=number * 100 + i)
                for pages in (mine, common):
                    if either.page_set(pages.keys, pages.sealed()) != [True] * 4:
                        faults.append("not stored")
                    room = pages.room()
                    done = either.page_get(pages.keys, room.pages, page.opener(pages.keys))
                    if done != [True] * 4 or pages.wrong(done, room):
                        faults.append(f"thread {number}: read {done}")
                    if either.batch_exists(pages.keys) != 4:
                        faults.append("not there")

        _together([partial(work, n) for n in range(6)], faults)
        assert not faults

    @promise(5)
    def test_two_threads_set_one_key_at_once(self, raw: Backend) -> None:
        """Whoever wins, one whole page is there."""
        for i in range(25):
            one, two = Pages(count=1, size=1 << 18, seed=i), Pages(count=1, size=1 << 18, seed=i)
            two.payloads = [bytes(reversed(one.payloads[0]))]
            faults: list[str] = []
            _together([partial(raw.page_set, p.keys, p.sealed()) for p in (one, two)], faults)
            room = one.room()
            assert raw.page_get(one.keys, room.pages, page.opener(one.keys)) == [True]
            assert room.payload(0) in (one.payloads[0], two.payloads[0])
            assert not faults

    @promise(5)
    def test_another_process_sees_a_page_at_the_next_call(self, store_url: str) -> None:
        """In both directions, page for page."""
        with registry.open(store_url) as store:
            self._capabilities = store.capabilities
            self.needs("shared")
            code = (
                "say('ready')\n"
                "for line in sys.stdin:\n"
                "    i = int(line)\n"
                "    theirs, mine = Pages(seed=2 * i), Pages(seed=2 * i + 1)\n"
                "    room = theirs.room()\n"
                "    done = store.page_get(theirs.keys, room.pages)\n"
                "    right = not theirs.wrong(done, room)\n"
                "    ok = store.page_set(mine.keys, mine.sealed())\n"
                "    say(store.batch_exists(theirs.keys), all(done), right, all(ok))\n"
            )
            with second_process(store_url, code) as other:
                assert other.stdout is not None
                assert other.stdin is not None
                assert other.stdout.readline() == "ready\n"
                for i in range(10):
                    ours, theirs = Pages(seed=2 * i), Pages(seed=2 * i + 1)
                    assert store.batch_exists(theirs.keys) == 0
                    assert all(store.page_set(ours.keys, ours.sealed()))
                    print(i, file=other.stdin, flush=True)
                    assert other.stdout.readline().split() == ["8", "True", "True", "True"]
                    room = theirs.room()
                    assert store.batch_exists(theirs.keys) == 8
                    done = store.page_get(theirs.keys, room.pages)
                    assert all(done)
                    assert not theirs.wrong(done, room)
                other.stdin.close()

    @promise(5)
    def test_two_processes_set_the_same_pages_at_once(self, store_url: str) -> None:
        """Every page is whole after, and while, both write."""
        with registry.open(store_url) as store:
            self._capabilities = store.capabilities
            self.needs("shared")
            code = (
                "say('ready'); sys.stdin.readline()\n"
                "for i in range(20):\n"
                "    pages = Pages(size=32768, seed=i)\n"
                "    assert all(store.page_set(pages.keys, pages.sealed()))\n"
                "say('done')\n"
            )
            with second_process(store_url, code) as other:
                assert other.stdout is not None
                assert other.stdin is not None
                assert other.stdout.readline() == "ready\n"
                print(file=other.stdin, flush=True)
                for i in range(20):
                    pages = Pages(size=32768, seed=i)
                    assert all(store.page_set(pages.keys, pages.sealed()))
                    room = pages.room()
                    done = store.page_get(pages.keys, room.pages)
                    assert all(done)
                    assert not pages.wrong(done, room)
                assert other.stdout.readline() == "done\n"

    @promise(5)
    def test_pages_outlive_closing(self, store_url: str) -> None:
        """A reopened store has what was stored, and its descriptors."""
        pages = Pages()
        with registry.open(store_url) as store:
            self._capabilities = store.capabilities
            self.needs("durable")
            store.page_set(pages.keys, pages.sealed())
            store.put_meta("conformance-0", b"described")
        with registry.open(store_url) as store:
            room = pages.room()
            assert store.batch_exists(pages.keys) == 8
            done = store.page_get(pages.keys, room.pages)
            assert all(done)
            assert not pages.wrong(done, room)
            assert store.get_meta("conformance-0") == b"described"

    @promise(5)
    def test_opening_and_closing_leaks_nothing(self, store_url: str) -> None:
        """No descriptor and no thread is left over twenty rounds with work in each."""
        before = set(threading.enumerate())
        early = (0, 0)
        for i in range(20):
            with registry.open(store_url) as store:
                pages = Pages(seed=i)
                store.page_set(pages.keys, pages.sealed())
                store.page_get(pages.keys, pages.room().pages)
            if i == 4:
                early = _held(before)
        late = _held(before)
        assert late[0] <= early[0], f"{late[0] - early[0]} descriptors were leaked in 15 rounds"
        assert late[1] <= early[1], f"{late[1] - early[1]} threads were leaked in 15 rounds"

    @promise(11)
    def test_opened_to_look_a_store_stays_as_it_is(self, store_url: str) -> None:
        """With `read_only_options` nothing is stored or removed, damaged pages neither."""
        pages, fresh = Pages(count=3), Pages(count=2, seed=1)
        with registry.open(store_url, raw=True) as raw:
            self._capabilities = raw.capabilities
            self.needs("durable", "shared")
            if not raw.read_only_options:
                raise LacksCapability("no read_only_options")
            raw.page_set(pages.keys, pages.sealed())
            self.raw_write(raw, pages.keys[1], bytes(len(pages.stored(1))))
            self.raw_write(raw, pages.keys[2], pages.stored(2)[:-1])
            before = [self.raw_read(raw, key) for key in pages.keys]
            mark = "&" if "?" in store_url else "?"
            with registry.open(f"{store_url}{mark}{urlencode(raw.read_only_options)}") as store:
                assert store.capabilities.read_only
                assert not store.capabilities.delete
                store.health()
                room = pages.room()
                assert store.page_get(pages.keys, room.pages) == [True, False, False]
                assert not pages.wrong([True], room)
                assert store.page_set(fresh.keys, fresh.sealed()) == [False, False]
                with pytest.raises(BackendUnavailable):
                    store.put_meta("conformance-0", b"x")
            assert [self.raw_read(raw, key) for key in pages.keys] == before
            assert raw.exists_each(fresh.keys) == [False, False]
            assert raw.list_meta() == []


def _together(calls: Sequence[Callable[[], object]], faults: list[str]) -> None:
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        barrier.wait(10)
        try:
            call()
        except Exception as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def _held(before: set[threading.Thread]) -> tuple[int, int]:
    """Open descriptors and threads beyond `before`, once those that are about to end have."""
    until = time.monotonic() + 2
    while (new := set(threading.enumerate()) - before) and time.monotonic() < until:
        time.sleep(0.005)
    return len(os.listdir("/proc/self/fd")), len(new)
