"""The proxy of the fault tests: what it passes, what it does not, what is left of it."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from l3store.testing.leaks import check_leaks
from l3store.testing.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BODY = bytes(range(256)) * 16_384  # 4 MiB


class Server:
    """Sends each byte back; for a line that is a number sends so many bytes of BODY."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections: list[socket.socket] = []
        self.heard = 0
        listener.listen(64)
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while said := connection.recv(65536):
                self.heard += len(said)
                if said.strip().isdigit():
                    connection.sendall(BODY[: int(said)])
                else:
                    connection.sendall(said)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server() -> Iterator[Server]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = Server(listener)
    one.address = listener.getsockname()
    yield one
    one.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.address, buffer_bytes=8192) as one:
        yield one


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(proxy.address, timeout=10)


def ask(client: socket.socket, count: int) -> bytes:
    """Returns what comes of `count` bytes until the connection ends or all are there."""
    client.sendall(b"%d\n" % count)
    return receive(client, count)


def receive(client: socket.socket, count: int) -> bytes:
    got = bytearray()
    with suppress(ConnectionError):
        while len(got) < count and (part := client.recv(65536)):
            got += part
    return bytes(got)


def fill(client: socket.socket) -> int:
    """Sends until nobody takes it any more; returns how much was sent."""
    sent = 0
    with suppress(TimeoutError):
        while sent < 100 << 20:
            sent += client.send(BODY[:4096])
    return sent


def same(got: bytes, wanted: bytes) -> bool:
    return got == wanted


def test_passes_bodies_of_several_connections_unchanged(proxy: Proxy) -> None:
    clients = [connect(proxy) for _ in range(4)]
    for client in clients:
        client.sendall(b"%d\n" % len(BODY))
    for client in clients:
        assert same(receive(client, len(BODY)), BODY)
    assert proxy.accepted == proxy.connections == 4
    for client in clients:
        client.close()


def test_forwards_to_a_unix_socket(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    server = Server(listener)
    with Proxy(tmp_path / "s") as proxy, connect(proxy) as client:
        assert same(ask(client, 100_000), BODY[:100_000])
    server.close()


def test_an_end_of_one_side_is_an_end_for_the_other(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert ask(client, 10) == BODY[:10]
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


def test_refuses_and_is_there_again_on_the_same_port(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert ask(client, 1) == BODY[:1]
        proxy.refuse()
        assert receive(client, 1) == b""
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
    proxy.restore()
    with connect(proxy) as client:
        assert ask(client, 5) == BODY[:5]


def test_frozen_it_accepts_and_passes_nothing(proxy: Proxy, server: Server) -> None:
    with connect(proxy) as old:
        assert ask(old, 3) == BODY[:3]
        heard = server.heard
        proxy.freeze()
        with connect(proxy) as new:
            for client in (old, new):
                client.settimeout(0.1)
                client.sendall(b"7\n")
            for client in (old, new):
                with pytest.raises(TimeoutError):
                    client.recv(1)
            assert server.heard == heard
            proxy.restore()
            for client in (old, new):
                client.settimeout(10)
                assert receive(client, 7) == BODY[:7]


def test_frozen_it_swallows_little(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert ask(client, 1) == BODY[:1]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        client.settimeout(0.2)
        proxy.freeze()
        assert fill(client) < 200_000


@pytest.mark.parametrize("count", [0, 1, 100, 70_000, 1_000_000])
def test_cuts_after_a_number_of_bytes_once(proxy: Proxy, count: int) -> None:
    with connect(proxy) as client:
        assert ask(client, 50) == BODY[:50]
        proxy.cut_after(count)
        assert same(ask(client, 2_000_000), BODY[:count])
    with connect(proxy) as client:
        assert same(ask(client, 2_000_000), BODY[:2_000_000])


def test_cuts_what_goes_to_the_server(proxy: Proxy, server: Server) -> None:
    with connect(proxy) as client:
        proxy.cut_after(1000, towards="server")
        with suppress(ConnectionError):
            client.sendall(b"x" * 5000)
        assert len(receive(client, 5000)) <= 1000
    assert server.heard <= 1000


def test_cuts_each_connection_until_restored(proxy: Proxy) -> None:
    with connect(proxy) as old:
        assert ask(old, 1) == BODY[:1]
        proxy.cut_after(10, each=True)
        assert ask(old, 100) == BODY[:10]
    for _ in range(2):
        with connect(proxy) as client:
            assert ask(client, 100) == BODY[:10]
    proxy.restore()
    with connect(proxy) as client:
        assert ask(client, 100) == BODY[:100]


def test_cuts_what_is_open_now(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert ask(client, 1) == BODY[:1]
        proxy.cut()
        assert receive(client, 1) == b""
    with connect(proxy) as client:
        assert ask(client, 1) == BODY[:1]


def test_is_slow(proxy: Proxy) -> None:
    proxy.slow(200_000)
    with connect(proxy) as client:
        start = time.monotonic()
        assert same(ask(client, 100_000), BODY[:100_000])
        assert time.monotonic() - start >= 0.4
        proxy.restore()
        assert same(ask(client, 2_000_000), BODY[:2_000_000])


def test_garbles_one_byte_or_puts_others_there_once(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert ask(client, 10) == BODY[:10]
        proxy.garble(70_000)
        got = ask(client, 100_000)
        wrong = [i for i in range(100_000) if got[i] != BODY[i]]
        assert wrong == [70_000]
        assert got[70_000] == BODY[70_000] ^ 0xFF
        proxy.garble(3, b"abc")
        assert ask(client, 8) == BODY[:3] + b"abc" + BODY[6:8]
        assert ask(client, 8) == BODY[:8]


def test_a_server_that_is_not_there_ends_the_connection() -> None:
    with socket.socket() as gone:  # bound and not listening
        gone.bind(("127.0.0.1", 0))
        with Proxy(gone.getsockname()) as proxy, connect(proxy) as client:
            assert receive(client, 1) == b""


def test_a_closed_one_says_so(server: Server) -> None:
    proxy = Proxy(server.address)
    proxy.close()
    proxy.close()
    with pytest.raises(ValueError, match="closed"):
        proxy.freeze()


def test_leaves_no_descriptor_and_no_thread(server: Server) -> None:
    def one_round() -> None:
        with Proxy(server.address) as proxy:
            clients = [connect(proxy) for _ in range(3)]
            assert ask(clients[0], 1000) == BODY[:1000]
            proxy.refuse()
            proxy.restore()
            with connect(proxy) as late:
                assert ask(late, 10) == BODY[:10]
                proxy.freeze()
            for client in clients:
                client.close()

    check_leaks(one_round, rounds=5)


def test_a_leak_is_found_and_named() -> None:
    kept: list[socket.socket] = []

    def one_round() -> None:
        kept.append(socket.socket())

    with pytest.raises(AssertionError, match=r"descriptor.*socket:"):
        check_leaks(one_round, rounds=3, seconds=0.2)
    for one in kept:
        one.close()
