"""A real server for each module, and a peer that says exactly what a test wants."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

import pytest

from l3store.backends.redis.wire import Wire
from l3store.errors import ConfigError
from l3store.servers.certificates import Certificates
from l3store.servers.redis import RedisServer


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A machine that does ten things at once is no fault of the backend."""
    monkeypatch.setenv("L3STORE_REDIS_TIMEOUT", "20s")
    monkeypatch.setenv("L3STORE_REDIS_CONNECT_TIMEOUT", "10s")
    monkeypatch.setenv("L3STORE_STACK_DEADLINE", "60s")


def _or_skip(make):
    try:
        return make()
    except ConfigError as error:
        if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def running():
    with _or_skip(RedisServer) as server:
        yield server


@pytest.fixture
def tls_url(tmp_path):
    """Of a server that speaks TLS alone."""
    certificates = _or_skip(lambda: Certificates.make(tmp_path))
    with _or_skip(lambda: RedisServer(tls=certificates)) as server:
        yield f"{server.url}?tls_ca={certificates.ca}"


@pytest.fixture
def server(running):
    yield running
    running.command("FLUSHALL", "SYNC")  # else its memory counts for a while


class Peer:
    """The other end of a wire: sends what it is told, in pieces."""

    def __init__(self, timeout=5.0):
        ours, self._theirs = socket.socketpair()
        self.sock = ours
        self.wire = Wire(ours, timeout)
        self._threads = []

    def says(self, data, piece=None, pause=0.0, end=False):
        """Sends `data` in pieces of so many bytes, and then no more if it is the `end`."""

        def send():
            step = piece or max(1, len(data))
            with suppress(OSError):  # a test may be at its end
                for at in range(0, len(data), step):
                    self._theirs.sendall(data[at : at + step])
                    if pause:
                        time.sleep(pause)
            if end:
                self._theirs.shutdown(socket.SHUT_WR)

        self._threads.append(threading.Thread(target=send))
        self._threads[-1].start()

    def heard(self, count):
        data = b""
        while len(data) < count:
            data += self._theirs.recv(count - len(data))
        return data

    def heard_all(self):
        """What we have sent and it has not read yet."""
        self._theirs.setblocking(False)
        try:
            return self._theirs.recv(1 << 20)
        except BlockingIOError:
            return b""
        finally:
            self._theirs.setblocking(True)

    def close(self):
        self.sock.close()
        for thread in self._threads:
            thread.join(10)
        self._theirs.close()


@pytest.fixture
def new_peer():
    made = []

    def new(timeout=5.0):
        made.append(Peer(timeout))
        return made[-1]

    yield new
    for peer in made:
        peer.close()


@pytest.fixture
def peer(new_peer):
    return new_peer()
