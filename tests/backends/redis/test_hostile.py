"""What a server, a network or a caller at his worst may do, and what must not come of it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress

import pytest

from l3store import registry
from l3store.abc import call_deadline
from l3store.backends.redis import RedisBackend, RedisOptions
from l3store.backends.redis.expiry import Expiry
from l3store.backends.redis.links import KINDS, Link, arguments
from l3store.backends.redis.pages import write_pages
from l3store.backends.redis.refusals import FAULTS, Refused
from l3store.backends.redis.store import Store
from l3store.backends.redis.wire import OutOfStep, Wire
from l3store.config import StoreURL
from l3store.errors import BackendTimeout, BackendUnavailable
from l3store.servers.process import HOST
from l3store.servers.redis import RedisServer
from l3store.testing.kit import Pages
from l3store.testing.proxy import Proxy

# -- replies that are none --------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"+OKX\n", b"+OKX\n+OK\r\n", b"\n\n\n\r\n", b"+" + b"x" * 99_999])
def test_a_line_end_that_was_garbled_ends_the_call(new_peer, said):
    peer = new_peer(timeout=0.5)
    peer.says(said)
    page = [memoryview(b"page")]
    with pytest.raises((OutOfStep, TimeoutError, BlockingIOError)):
        list(write_pages(peer.wire, 1 << 20, [(b"<", b">")] * 2, [page] * 2, [4, 4]))
    peer.sock.close()


@pytest.mark.parametrize(
    "said", [b">2", b"$5", b"*1", b"hello", b"", b"_", b"%1", b"#t", b"(12", b",1.5", b"$-2"]
)
def test_a_reply_that_is_longer_than_a_line_is_not_taken_for_one(peer, said):
    peer.says(b":1\r\n" + said + b"\r\n:1\r\n")
    with pytest.raises(OutOfStep):
        peer.wire.lines(b"", 3)


def test_the_replies_of_one_line_are(peer):
    peer.says(b":1\r\n+OK\r\n$-1\r\n-ERR no\r\n:-2\r\n")
    assert peer.wire.lines(b"", 5) == [b":1", b"+OK", b"$-1", b"-ERR no", b":-2"]


@pytest.mark.parametrize(
    "said",
    [
        b":x\r\n", b":\r\n", b":" + b"9" * 5000 + b"\r\n", b"$x\r\n", b"$3\r\nabcXY",
        b"$99999999999999\r\n", b"*999999999999\r\n", b"*1\r\n" * 2000, b">1\r\n:1\r\n",
        b"%1\r\n+a\r\n+b\r\n", b"\r\n",
    ],
)  # fmt: skip
def test_what_is_no_reply_to_a_small_request_is_out_of_step(peer, said):
    peer.says(said)
    with pytest.raises(OutOfStep):
        peer.wire.reply()


@pytest.mark.parametrize("said", [b"+OK", b"$-1", b":", b":1x", b":" + b"9" * 5000])
def test_a_count_that_is_none_is_an_outage(server, said, monkeypatch):
    with registry.open(server.url, raw=True) as store:
        monkeypatch.setattr(Store, "lines", lambda _, names, __: [said] * len(names))
        with pytest.raises(BackendUnavailable, match="no reply"):
            store.exists_each(Pages(count=2).keys)


@pytest.mark.parametrize(
    "line", ["ASK", "ASK 12", "ASK 12 h", "ASK 12 h:x", "ASK 12 :7000", "ASK 12 h:\u00b2", "ASK  "]
)
def test_a_server_that_does_not_say_where_is_asked_again_itself(line):
    assert Refused(line).elsewhere
    assert Refused(line).asks is None
    assert Refused("ASK 12 ::1:7000").asks == ("::1", 7000)


@pytest.mark.parametrize("at", [3, 4])
def test_a_garbled_reply_to_what_is_stored_is_an_outage_in_time(server, at):
    """The line end of a reply to a SET."""
    pages = Pages(count=3)
    with (
        Proxy((HOST, server.port)) as proxy,
        registry.open(f"redis://{HOST}:{proxy.port}?timeout=1s", raw=True) as store,
    ):
        store.page_set(pages.keys[:1], pages.sealed()[:1])
        asked = b":0\r\n:0\r\n$-1\r\n"  # STRLEN, length, marker
        proxy.garble(len(asked) + at)
        with pytest.raises((BackendUnavailable, BackendTimeout)) as told:
            store.page_set(pages.keys[1:2], pages.sealed()[1:2])
        assert not any(told.value.done)
        assert store.page_set(pages.keys, pages.sealed()) == [True] * 3


@pytest.mark.parametrize(
    "said",
    [None, [], [b"0"], [b"0", None], [b"0", [None]], [b"0", [1]], [1, []], [None, []], b"0",
     [b"0", [], []]],
)  # fmt: skip
def test_what_is_no_answer_to_a_scan_is_an_outage(server, said, monkeypatch):
    with registry.open(server.url, raw=True) as store:
        monkeypatch.setattr(Wire, "ask", lambda *_: said)
        with pytest.raises(BackendUnavailable, match="SCAN"):
            list(store.scan())


def test_limits_that_are_no_numbers_are_an_outage(server, monkeypatch):
    with registry.open(server.url, raw=True) as store:
        for name in ("maxmemory", "proto-max-bulk-len"):
            said = [name.encode(), b"12-4"]
            with monkeypatch.context() as patch:
                patch.setattr(Wire, "ask", lambda *_, said=said: said)
                with pytest.raises(BackendUnavailable, match="12-4"):
                    store.details()
        with monkeypatch.context() as patch:
            patch.setattr(Wire, "ask", lambda *_: b"used_memory:1x\r\n")
            with pytest.raises(BackendUnavailable, match="1x"):
                store.details()


def test_a_name_that_a_scan_says_twice_is_listed_once(server, monkeypatch):
    keys = Pages(count=3).keys
    first, second, third = (f"l3:{key}".encode() for key in keys)
    said = iter([[b"7", [first, second]], [b"9", [second, first]], [b"0", [third, second]]])
    with registry.open(server.url, raw=True) as store:
        monkeypatch.setattr(Wire, "ask", lambda *_: next(said))
        assert list(store.scan()) == keys


@pytest.mark.parametrize("now", [b"new", b"n" * 1128])
def test_what_was_stored_since_a_page_was_found_damaged_stays(server, now):
    pages = Pages(count=1, size=1000)
    name = f"l3:{pages.keys[0]}"

    def check(i, page):
        server.command("SET", name, now)
        return False

    with registry.open(server.url, raw=True) as store:
        store.page_set(pages.keys, pages.sealed())
        assert store.page_get(pages.keys, pages.room().pages, check) == [False]
        assert (server.command("GET", name) == now) is True


def test_who_only_looks_removes_no_damage(server):
    pages = Pages(count=3, size=1000)
    with registry.open(server.url) as store:
        store.page_set(pages.keys, pages.sealed())
    server.command("SETRANGE", f"l3:{pages.keys[0]}", 700, b"damage")
    server.command("SET", f"l3:{pages.keys[1]}", b"short")
    with registry.open(f"{server.url}?mode=ro") as store:
        assert store.page_get(pages.keys, pages.room().pages) == [False, False, True]
        assert store.exists_each(pages.keys) == [True] * 3


# -- callers that are interrupted ----------------------------------------------------------------


@pytest.fixture
def keyboard():
    """Ctrl-C is an interrupt, also where this process was started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("keyboard")
def test_an_interrupted_call_returns_when_nobody_uses_the_memory_any_more(server):
    pages, started, go_on, ended = Pages(count=2), threading.Event(), threading.Event(), []

    def check(i, page):
        if threading.current_thread() is not threading.main_thread():
            started.set()
            go_on.wait(20)
            ended.append(i)
        return True

    def interrupt():
        started.wait(20)
        for _ in range(2):
            time.sleep(0.3)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.3)
        go_on.set()

    with registry.open(f"{server.url}?connections=2", raw=True) as store:
        store.page_set(pages.keys, pages.sealed())
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            store.page_get(pages.keys, pages.room().pages, check)
        assert ended == [1]
        thread.join()
        assert store.page_get(pages.keys, pages.room().pages) == [True, True]


def test_a_check_that_raises_leaves_no_connection_out_of_step(server):
    pages = Pages(count=20, size=20_000)

    def check(i, page):
        if i == 3:
            raise LookupError("mine")
        return True

    with registry.open(f"{server.url}?connections=3", raw=True) as store:
        store.page_set(pages.keys, pages.sealed())
        for _ in range(3):
            with pytest.raises(LookupError, match="mine"):
                store.page_get(pages.keys, pages.room().pages, check)
            room = pages.room()
            assert store.page_get(pages.keys, room.pages) == [True] * 20
            assert not pages.wrong([True] * 20, room)


def test_a_connection_that_was_interrupted_while_it_was_opened_is_not_used(server, monkeypatch):
    server.command("SET", "x", "1")  # in database 0
    with Proxy((HOST, server.port)) as proxy:
        url = StoreURL.parse(f"redis://{HOST}:{proxy.port}")
        given = arguments(url, RedisOptions(timeout=20.0, connect_timeout=10.0))
        link = Link.to(KINDS["redis"], 20.0, "h", host=HOST, port=proxy.port, db=3, **given)
        proxy.freeze()  # what it is asked for while it is opened is answered late

        def interrupted(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(KINDS["redis"], "read_response", interrupted)
            with pytest.raises(KeyboardInterrupt), link.lend():
                pass
        threading.Timer(0.5, proxy.restore).start()
        with link.lend() as wire:
            assert wire.ask("GET", "x") is None
        link.close()


def test_a_forked_process_may_close_while_the_parent_calls(server):
    pages, started, go_on = Pages(count=1), threading.Event(), threading.Event()

    def check(i, page):
        started.set()
        return go_on.wait(20)

    with RedisBackend.from_url(StoreURL.parse(server.url)) as store:
        store.page_set(pages.keys, pages.sealed())
        thread = threading.Thread(
            target=store.page_get, args=(pages.keys, pages.room().pages, check)
        )
        thread.start()
        started.wait(20)
        child = os.fork()
        if not child:
            signal.alarm(4)  # less than what a close waits for calls that run
            store.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        go_on.set()
        thread.join()
        assert store.page_get(pages.keys, pages.room().pages) == [True]


# -- time ----------------------------------------------------------------------------------------


def test_parts_that_wait_for_a_thread_have_the_deadline_of_their_call():
    """Ten times as many as there are threads, each as slow as the deadline lets it be."""
    with RedisServer() as server:
        pages = Pages(count=320)
        url = f"{server.url}?connections=320&timeout=20s&connect_timeout=10s&deadline=1s"
        with registry.open(url) as store:
            store.page_set(pages.keys, pages.sealed())
            server.freeze()
            start = time.monotonic()
            with pytest.raises(BackendTimeout):
                store.page_get(pages.keys, pages.room().pages)
            assert time.monotonic() - start < 6
            server.thaw()


def test_a_greeting_that_comes_slowly_ends_with_the_deadline():
    """AUTH, the client's name, its version, SELECT: each answered late, and in time for itself."""

    def serve(listener):
        connection, _ = listener.accept()
        with suppress(OSError), connection:
            while connection.recv(65536):
                for _ in range(2):
                    time.sleep(2.0)
                    connection.sendall(b"+OK\r\n")

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        options = RedisOptions(timeout=20.0, connect_timeout=10.0, password="p")
        given = arguments(StoreURL.parse("redis://h"), options)
        link = Link.to(KINDS["redis"], 20.0, "h", host=HOST, port=port, db=3, **given)
        start = time.monotonic()
        with pytest.raises(FAULTS), call_deadline(3.0), link.lend():
            pass
        assert time.monotonic() - start < 6
        link.close()
        thread.join(10)


# -- lives and lengths that end ----------------------------------------------------------------


def test_a_page_whose_life_ends_while_it_is_looked_at_is_stored_again(server, monkeypatch):
    pages, refresh = Pages(count=3), Expiry.refresh

    def late(self, store, names, *rest):
        server.command("DEL", names[1])
        return refresh(self, store, names, *rest)

    with registry.open(f"{server.url}?ttl=1h") as store:
        store.page_set(pages.keys, pages.sealed())
        monkeypatch.setattr(Expiry, "refresh", late)
        assert store.page_set(pages.keys, pages.sealed()) == [True] * 3
        assert store.exists_each(pages.keys) == [True] * 3
        assert store.page_get(pages.keys, pages.room().pages) == [True] * 3, "read is read"


def test_pages_that_were_read_are_told_when_their_lives_cannot_be_begun_anew(server, monkeypatch):
    pages = Pages(count=3)

    def cut(*_):
        raise ConnectionResetError("cut")

    with registry.open(f"{server.url}?ttl=1h", raw=True) as store:
        store.page_set(pages.keys, pages.sealed())
        monkeypatch.setattr(Store, "lines", cut)
        with pytest.raises(BackendUnavailable) as told:
            store.page_get(pages.keys, pages.room().pages)
    assert told.value.done == [True] * 3


def test_who_has_another_length_removes_nothing_while_the_right_one_is_not_known(server):
    """The server may evict what it knows of a place."""
    pages, wrong = Pages(count=2, size=1000), Pages(count=2, size=500).room()
    with registry.open(server.url) as store:
        store.page_set(pages.keys, pages.sealed())
    server.command("DEL", "l3:lengths")
    with registry.open(server.url) as store:
        assert store.page_get(pages.keys, wrong.pages) == [False, False]
        assert store.exists_each(pages.keys) == [True, True]
        assert store.page_set(pages.keys, pages.sealed()) == [True, True]
        with pytest.raises(ValueError, match="1000 payload bytes"):
            store.page_get(pages.keys, wrong.pages)


def test_a_page_that_is_damaged_in_its_middle_is_healed_by_reader_and_writer(server):
    pages = Pages(count=2, size=1000)
    with registry.open(server.url) as store:
        store.page_set(pages.keys, pages.sealed())
        server.command("SETRANGE", f"l3:{pages.keys[0]}", 700, b"damage")
        assert store.page_get(pages.keys, pages.room().pages) == [False, True]
        assert store.page_set(pages.keys, pages.sealed()) == [True, True]
        assert store.page_get(pages.keys, pages.room().pages) == [True, True]
