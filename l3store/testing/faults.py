"""`FaultSuite`: what a store on a server does when that server, or the way to it, fails.

    class TestMine(FaultSuite):
        @pytest.fixture
        def server(self): ...
        def address(self, server): return "127.0.0.1", server.port
        def url(self, server, address): return f"mine://{address[0]}:{address[1]}"

Each test makes a fault on a real server (see `Server`) or on a `Proxy` before it, and asks for
three things: a typed error or a miss within the deadline; never a wrong byte, and none after the
return; and that all is well again when the fault is over, without a restart of anything of ours.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pytest

from l3store import registry
from l3store.errors import BackendTimeout, BackendUnavailable, ConfigError, L3Error
from l3store.testing.kit import Guarded, Pages
from l3store.testing.leaks import check_leaks
from l3store.testing.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from l3store.abc import Backend
    from l3store.testing.proxy import Side

__all__ = ["DOWN", "FaultSuite", "Server", "failing", "get", "until_well", "with_options"]

DOWN = (BackendUnavailable, BackendTimeout)
"""What an unreachable store raises."""
_LONG = 20.0  # seconds until all must be well again
_SHARES = (0.0, 0.3, 0.62, 0.9)  # of a body; at the ends single bytes are tried, too


class Server(Protocol):
    """A real server of a test's own."""

    def freeze(self) -> None:
        """Stops it; its connections stay open."""

    def thaw(self) -> None:
        """Lets it go on."""

    def kill(self) -> None:
        """Ends it."""

    def restart(self) -> None:
        """Starts it again where it was."""


def with_options(url: str, **options: object) -> str:
    """Returns a URL with more options."""
    more = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{url}{'&' if '?' in url else '?'}{more}" if more else url


def failing(call: Callable[[], object], *, within: float) -> L3Error:
    """Returns the error of a call that must find its store down, in so many seconds."""
    start = time.monotonic()
    with pytest.raises(DOWN) as caught:
        call()
    took = time.monotonic() - start
    assert took < within, f"{caught.value!r} came after {took:.2f} s"
    return caught.value


def get(store: Backend, pages: Pages) -> tuple[list[bool], Guarded]:
    """Reads all pages; what is called read is compared, also if the call fails on the way."""
    room, done = pages.room(), list[bool]()
    try:
        done = store.page_get(pages.keys, room.pages)
    except L3Error as error:
        done = error.done
        raise
    finally:
        assert pages.wrong(done, room) == []
        assert room.intact()
    return done, room


def until_well(store: Backend, pages: Pages) -> None:
    """Blocks until the store takes the pages and gives them back; fails if it does not."""
    limit = time.monotonic() + _LONG
    while True:
        try:
            stored = store.page_set(pages.keys, pages.sealed())
            done, _ = get(store, pages)
            if all(stored) and all(done):
                return
            why = f"stored {stored}, read {done}"
        except DOWN as error:
            why = repr(error)
        assert time.monotonic() < limit, why
        time.sleep(0.05)


class FaultSuite:
    """Inherit, and give a server."""

    longest: ClassVar[float] = 5.0
    """Seconds: no call on a dead, frozen or slow store may take longer, whatever the machine does
    beside. (The deadlines are shorter.)"""
    plain: ClassVar[bool] = True
    """A read of some pages comes over one connection, in as many bytes each time."""
    options: ClassVar[dict[str, object]] = {}
    """Of the store's URL in every test."""
    hasty: ClassVar[dict[str, object]] = {}
    """More of them that shorten the store's own waits, so that the tests are short, too; what it
    does by default is tested without."""
    brief: ClassVar[dict[str, object]] = {"deadline": "300ms", "breaker_cooldown": "10ms",
                                          "breaker_max_cooldown": "20ms"}  # fmt: skip
    """More of them where many faults follow each other."""

    @pytest.fixture
    def server(self) -> Iterator[Any]:
        """A running, empty `Server`."""
        raise NotImplementedError("give a fixture that starts a server")

    def address(self, server: Any) -> tuple[str, int]:
        """Returns where the server listens."""
        raise NotImplementedError("say where the server listens")

    def url(self, server: Any, address: tuple[str, int]) -> str:
        """Returns the URL of the server's store, reached through `address`."""
        raise NotImplementedError("give the URL of the store at an address")

    # -- fixtures --------------------------------------------------------------------------

    @pytest.fixture(params=["bare", "wrapped"])
    def raw(self, request: pytest.FixtureRequest) -> bool:
        """Whether the store is opened bare."""
        return bool(request.param == "bare")

    @pytest.fixture
    def proxy(self, server: Any) -> Iterator[Proxy]:
        """Between the store of `distant` and the server."""
        with Proxy(self.address(server)) as proxy:
            yield proxy

    @pytest.fixture
    def near(self, server: Any, raw: bool) -> Iterator[Backend]:
        """A store straight at the server."""
        url = with_options(self.url(server, self.address(server)), **self.options)
        with registry.open(url, raw=raw) as store:
            yield store

    @pytest.fixture
    def distant(self, server: Any, proxy: Proxy, raw: bool) -> Iterator[Backend]:
        """A store behind the proxy."""
        url = with_options(self.url(server, proxy.address), **self.options, **self.hasty)
        with registry.open(url, raw=raw) as store:
            yield store

    @pytest.fixture
    def pages(self) -> Pages:
        """Some, larger together than what sockets hold."""
        return Pages(count=6, size=100_000, segments=2)

    # -- the server -------------------------------------------------------------------------

    def test_a_dead_server_is_an_error_at_once_and_one_that_is_back_serves(
        self, server: Any, near: Backend, pages: Pages
    ) -> None:
        """Killed: each call raises, and nothing is called done."""
        until_well(near, pages)
        server.kill()
        for call in self._calls(near, pages):
            error = failing(call, within=self.longest)
            assert not any(error.done)
        server.restart()
        until_well(near, pages)

    def test_a_frozen_server_is_an_error_in_time_and_nothing_comes_late(
        self, server: Any, near: Backend, pages: Pages
    ) -> None:
        """Stopped (SIGSTOP): what it says after all reaches no caller's memory."""
        until_well(near, pages)
        rooms: list[Guarded] = []
        server.freeze()
        try:
            for call in self._calls(near, pages, rooms)[:3]:
                failing(call, within=self.longest)
            for room in rooms:
                room.reuse()
        finally:
            server.thaw()
        until_well(near, pages)
        assert all(room.untouched() for room in rooms)

    def test_the_breaker_spares_a_dead_server(
        self, server: Any, proxy: Proxy, pages: Pages
    ) -> None:
        """After three failures no call reaches it."""
        given = {**self.options, **self.hasty, "breaker_cooldown": "60s"}
        url = with_options(self.url(server, proxy.address), **given)
        with registry.open(url) as store:
            until_well(store, pages)
            proxy.freeze()
            for _ in range(3):
                failing(lambda: get(store, pages), within=self.longest)
            tried = proxy.accepted
            for call in self._calls(store, pages):
                assert "breaker is open" in str(failing(call, within=self.longest))
            assert proxy.accepted == tried

    def test_a_dead_or_frozen_server_cannot_be_opened(self, server: Any, raw: bool) -> None:
        """Opening is bounded like a call."""
        url = with_options(self.url(server, self.address(server)), **self.options)
        server.freeze()
        try:
            failing(lambda: registry.open(url, raw=raw), within=self.longest)
        finally:
            server.thaw()
        server.kill()
        failing(lambda: registry.open(url, raw=raw), within=self.longest)
        server.restart()
        with registry.open(url, raw=raw) as store:
            until_well(store, Pages(count=2))

    # -- the way to it ----------------------------------------------------------------------

    def test_refused_connections_are_errors_and_the_pages_are_there_again(
        self, proxy: Proxy, distant: Backend, pages: Pages
    ) -> None:
        """Nobody listens for a while."""
        until_well(distant, pages)
        proxy.refuse()
        for call in self._calls(distant, pages):
            failing(call, within=self.longest)
        proxy.restore()
        self._read_again(distant, pages)

    def test_a_silent_network_is_an_error_in_time_and_nothing_comes_late(
        self, proxy: Proxy, distant: Backend, pages: Pages
    ) -> None:
        """Connections are taken and nothing passes."""
        until_well(distant, pages)
        rooms: list[Guarded] = []
        proxy.freeze()
        for call in self._calls(distant, pages, rooms):
            failing(call, within=self.longest)
        for room in rooms:
            room.reuse()
        proxy.restore()
        self._read_again(distant, pages)
        assert all(room.untouched() for room in rooms)

    def test_an_answer_that_comes_late_is_not_the_next_calls(
        self, proxy: Proxy, distant: Backend, pages: Pages
    ) -> None:
        """A call that begins after one that timed out, before what that one asked for comes."""
        others = Pages(count=pages.count, size=pages.size, segments=2, seed=1)
        until_well(distant, pages)
        until_well(distant, others)
        proxy.freeze()
        failing(lambda: get(distant, pages), within=self.longest)
        with ThreadPoolExecutor(1) as pool:
            began = pool.submit(get, distant, others)
            time.sleep(0.1)
            proxy.restore()
            with suppress(*DOWN):
                assert all(began.result(_LONG)[0])
        self._read_again(distant, others)
        self._read_again(distant, pages)

    def test_a_slow_network_ends_at_the_deadline_and_nothing_comes_late(
        self, server: Any, proxy: Proxy, pages: Pages
    ) -> None:
        """Bytes come all the time, too few of them."""
        url = with_options(self.url(server, proxy.address), deadline="500ms", **self.options)
        with registry.open(url) as store:
            until_well(store, pages)
            proxy.slow(100_000)  # six times too slow
            room = pages.room()
            failing(lambda: store.page_get(pages.keys, room.pages), within=self.longest)
            room.reuse()
            proxy.restore()
            self._read_again(store, pages)
            assert room.untouched()

    def test_a_connection_that_is_cut_anywhere_in_a_read(
        self, proxy: Proxy, distant: Backend, pages: Pages
    ) -> None:
        """In a head, in a header, in a payload, before the last byte."""
        until_well(distant, pages)
        before = _passed(proxy, "client")
        get(distant, pages)
        whole = _passed(proxy, "client") - before
        ends: tuple[int, ...] = (0, 1, 2, 10, 100, 1000)
        if self.plain:
            ends += (whole - 1000, whole - 3, whole - 2, whole - 1)
        for at in (*ends, *(int(whole * share) for share in _SHARES)):
            proxy.cut_after(at, each=self.plain)  # each, or a second try would hide it
            error = failing(lambda: get(distant, pages), within=self.longest)
            assert not all(error.done) or not error.done, f"cut after {at} of {whole} bytes"
            proxy.restore()
            self._read_again(distant, pages)

    def test_a_connection_that_is_cut_anywhere_in_a_write(
        self, server: Any, proxy: Proxy, distant: Backend, pages: Pages
    ) -> None:
        """What is visible then is whole."""
        until_well(distant, pages)
        before = _passed(proxy, "server")
        fresh = Pages(count=pages.count, size=pages.size, segments=2, seed=1)
        distant.page_set(fresh.keys, fresh.sealed())
        whole = _passed(proxy, "server") - before
        url = with_options(self.url(server, self.address(server)), **self.options)
        with registry.open(url) as other:
            ends = (0, 1, 20, 200, whole - 1000, whole - 2)
            for n, at in enumerate((*ends, *(int(whole * share) for share in _SHARES)), start=2):
                new = Pages(count=pages.count, size=pages.size, segments=2, seed=n)
                sealed = new.sealed()
                proxy.cut_after(at, towards="server", each=True)
                with suppress(*DOWN):  # a late cut may come after the last answer
                    distant.page_set(new.keys, sealed)
                proxy.restore()
                get(other, new)  # whole pages or none
                self._read_again(distant, pages)
                until_well(distant, new)

    def test_a_changed_byte_of_a_body_is_a_miss(
        self, server: Any, proxy: Proxy, pages: Pages
    ) -> None:
        """The checksum finds it."""
        url = with_options(self.url(server, proxy.address), **self.options)
        with registry.open(url) as store:
            until_well(store, pages)
            before = _passed(proxy, "client")
            get(store, pages)
            whole = _passed(proxy, "client") - before
            for share in (0.1, 0.5, 0.97):
                proxy.garble(int(whole * share))
                try:
                    done, _ = get(store, pages)
                    assert done.count(False) == 1
                except DOWN:
                    pass  # it was a byte of the protocol
                until_well(store, pages)

    def test_garbage_in_place_of_an_answer(
        self, proxy: Proxy, distant: Backend, pages: Pages
    ) -> None:
        """Bytes that are no answer."""
        until_well(distant, pages)
        for garbage in (b"\0" * 64, b"\xff" * 3, b"HTTP/1.1 204 No\r\n\r\n", b"\r\n" * 20):
            proxy.garble(0, garbage)
            with suppress(*DOWN):
                done, _ = get(distant, pages)
                assert not all(done)
            proxy.restore()
            until_well(distant, pages)

    def test_something_else_at_the_address_cannot_be_opened(self, server: Any, raw: bool) -> None:
        """A server of another kind."""
        with _Stranger(b"220 mail.example ESMTP\r\n") as stranger:
            url = with_options(self.url(server, stranger.address), **self.options, **self.hasty)
            start = time.monotonic()
            with pytest.raises((*DOWN, ConfigError)):
                registry.open(url, raw=raw)
            assert time.monotonic() - start < self.longest

    # -- again and again ----------------------------------------------------------------------

    def test_faults_while_many_threads_work_give_no_wrong_byte(
        self, server: Any, proxy: Proxy
    ) -> None:
        """Connections are not mixed up."""
        url = with_options(self.url(server, proxy.address), **self.options, **self.brief)
        over = Event()

        def work(seed: int) -> int:
            pages, reads = Pages(count=4, size=20_000, seed=seed), 0
            while not over.is_set():
                with suppress(*DOWN):
                    store.page_set(pages.keys, pages.sealed())
                    done, _ = get(store, pages)
                    reads += sum(done)
                time.sleep(0.002)
            return reads

        with registry.open(url) as store, ThreadPoolExecutor(6) as pool:
            until_well(store, Pages(count=4, size=20_000, seed=99))
            working = [pool.submit(work, seed) for seed in range(6)]
            try:
                for fault in (*self._faults(proxy), *self._faults(proxy)):
                    time.sleep(0.1)
                    fault()
                    time.sleep(0.05)
                    proxy.restore()
            finally:
                over.set()
            assert sum(one.result(_LONG) for one in working) > 0
            until_well(store, Pages(count=4, size=20_000, seed=99))

    def test_faults_leave_no_descriptor_and_no_thread(self, server: Any, proxy: Proxy) -> None:
        """Twenty rounds."""
        self._leave_nothing(server, proxy, rounds=20)

    @pytest.mark.soak
    @pytest.mark.timeout(3600)
    def test_a_thousand_rounds_of_faults_leave_no_descriptor_and_no_thread(
        self, server: Any, proxy: Proxy
    ) -> None:
        """As many as a bad week has."""
        self._leave_nothing(server, proxy, rounds=1000)

    # -- what the tests are made of ------------------------------------------------------------

    def _leave_nothing(self, server: Any, proxy: Proxy, *, rounds: int) -> None:
        pages = Pages(count=3, size=50_000)
        url = with_options(self.url(server, proxy.address), **self.options, **self.brief)

        def one_round() -> None:
            with suppress(*DOWN):
                get(store, pages)

        with registry.open(url) as store:
            faults = self._faults(proxy)

            def faulty_round() -> None:
                fault = faults[len(seen) % len(faults)]
                seen.append(fault)
                fault()
                one_round()
                proxy.restore()
                until_well(store, pages)
                # And a store that is opened, meets the fault and is closed.
                with suppress(*DOWN), registry.open(url) as brief:
                    fault()
                    get(brief, pages)
                proxy.restore()

            seen: list[object] = []
            until_well(store, pages)
            check_leaks(faulty_round, rounds=rounds, warm_up=len(faults))

    def _faults(self, proxy: Proxy) -> list[Callable[[], None]]:
        return [
            proxy.refuse,
            proxy.cut,
            lambda: proxy.cut_after(60_000),
            proxy.freeze,
            lambda: proxy.garble(10, b"garbage"),
        ]

    def _calls(
        self, store: Backend, pages: Pages, rooms: list[Guarded] | None = None
    ) -> list[Callable[[], object]]:
        """One of each kind; rooms that pages are read into are kept in `rooms`."""

        def read() -> object:
            room = pages.room()
            if rooms is not None:
                rooms.append(room)
            return store.page_get(pages.keys, room.pages)

        fresh = Pages(count=pages.count, size=pages.size, segments=2, seed=77)
        return [
            read,
            lambda: store.batch_exists(pages.keys),
            lambda: store.page_set(fresh.keys, fresh.sealed()),
            read,
        ]

    def _read_again(self, store: Backend, pages: Pages) -> None:
        """Fails unless the pages, which are there, are read soon."""
        limit = time.monotonic() + _LONG
        while True:
            with suppress(*DOWN):
                done, _ = get(store, pages)
                assert all(done), f"pages are gone: {done}"
                return
            assert time.monotonic() < limit, "the store did not come back"
            time.sleep(0.05)


def _passed(proxy: Proxy, side: Side) -> int:
    """Bytes handed on to a side; complete, also when the last of them have just arrived there."""
    proxy.restore()  # done between two steps of its thread, so what was sent has been counted
    return proxy.passed[side]


class _Stranger:
    """Something that listens, says a line that nobody asked for, and hears nothing."""

    def __init__(self, line: bytes) -> None:
        self._line = line
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._open: list[socket.socket] = []
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                connection.sendall(self._line)

    def __enter__(self) -> _Stranger:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._open:
            connection.close()
