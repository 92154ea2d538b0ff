"""The idle connection: whatever ends it, the next check reaches the master anew."""

from __future__ import annotations

import select
import socket
import struct

import pytest

from l3store.backends.mooncake.line import Line
from l3store.backends.mooncake.options import Address
from l3store.errors import BackendUnavailable


@pytest.fixture
def master():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


@pytest.fixture
def line(master):
    line = Line(Address("127.0.0.1", master.getsockname()[1]), 5)
    yield line
    line.close()


def has_ended(line):
    """Waits until the end of its connection has come here, and leaves it to be seen."""
    poll = select.poll()
    poll.register(line._socket, select.POLLRDHUP)
    return bool(poll.poll(10_000))


def test_while_it_stands_it_is_the_same_one(line, master):
    for _ in range(3):
        line.check()
    assert line.lives == 1
    assert line.own_address() == "127.0.0.1"


def test_one_that_was_ended_in_order_is_made_anew(line, master):
    line.check()
    other, _ = master.accept()
    other.close()
    assert has_ended(line)
    line.check()
    assert line.lives == 2


def test_one_that_fails_is_made_anew(line, master):
    """As of a machine that was switched off and on."""
    line.check()
    other, _ = master.accept()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    assert has_ended(line)
    line.check()
    assert line.lives == 2


def test_after_a_doubt_it_is_made_anew_and_nobody_there_is_told(line, master):
    line.check()
    line.doubt()
    line.check()
    assert line.lives == 2
    line.doubt()
    master.close()
    with pytest.raises(BackendUnavailable, match="no Mooncake master answers at 127"):
        line.check()
