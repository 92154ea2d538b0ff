"""A stream is cut into frames exactly, and a socket is written without waiting."""

from __future__ import annotations

import socket
import threading

import pytest

from l3store.consensus.frames import LIMIT, Channel, Frame, Inbox, pack_frame

COOKIE = bytes(range(16))
PAYLOADS = [b"", b"a", bytes(100), b"L3CT" * 50]


def taken(inbox, data):
    inbox.feed(data)
    return list(inbox.take())


@pytest.mark.parametrize("piece", [1, 2, 27, 28, 29, 100, 10_000])
def test_frames_that_come_in_pieces(piece):
    inbox = Inbox(COOKIE, 1000)
    stream = b"".join(pack_frame(Frame.RECORD, COOKIE, payload) for payload in PAYLOADS)
    found = []
    for at in range(0, len(stream), piece):
        found += taken(inbox, stream[at : at + piece])
    assert found == [(Frame.RECORD, payload) for payload in PAYLOADS]
    assert inbox.dropped == 0


def test_a_frame_of_another_cookie_or_version_is_passed_over():
    inbox = Inbox(COOKIE, 1000)
    good = pack_frame(Frame.BEAT, COOKIE, b"good")
    strange = pack_frame(Frame.BEAT, bytes(16), b"strange")
    newer = good[:4] + b"\2\0" + good[6:]
    assert taken(inbox, good + strange + newer + good) == [(Frame.BEAT, b"good")] * 2
    assert inbox.dropped == 2


@pytest.mark.parametrize("limit", [99, 100])
def test_a_length_above_the_limit_is_refused_before_it_is_kept(limit):
    inbox = Inbox(COOKIE, limit)
    head = pack_frame(Frame.RECORD, COOKIE, bytes(100))[:28]
    if limit == 100:
        assert taken(inbox, head) == []
    else:
        with pytest.raises(ValueError, match="a frame of 100 bytes; 99 is most"):
            taken(inbox, head)


def test_what_is_no_frame_is_refused():
    with pytest.raises(ValueError, match="no frame"):
        taken(Inbox(COOKIE, 1000), b"GET / HTTP/1.1\r\nHost: localhost")


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    channel = Channel(ours, Inbox(COOKIE, LIMIT), lambda: None)
    theirs.settimeout(10)
    yield channel, theirs
    channel.close()
    theirs.close()


def drained(channel, theirs, size):
    """Reads so many bytes while the channel is flushed as its thread would."""
    data = b""
    while len(data) < size:
        channel.flush()
        data += theirs.recv(65536)
    return data


def test_what_the_kernel_does_not_take_waits_and_keeps_its_order(pair):
    channel, theirs = pair
    frames = [bytes([number]) * 3000 for number in range(100)]
    waiting = [channel.send(frame) for frame in frames]
    assert waiting[0] == 0  # it went out at once
    assert channel.waiting == waiting[-1] > 200_000
    assert drained(channel, theirs, 300_000) == b"".join(frames)
    assert channel.waiting == 0


def test_the_newest_takes_the_place_of_one_that_could_not_go_out(pair):
    channel, theirs = pair
    first = bytes(100_000)
    channel.send(first)
    assert channel.waiting
    for number in range(10):
        channel.latest(b"report %d" % number)
    data = drained(channel, theirs, len(first) + len(b"report 9"))
    assert data == first + b"report 9"
    channel.latest(b"at once")
    assert theirs.recv(100) == b"at once"


def test_many_threads_send_whole_frames(pair):
    channel, theirs = pair
    frames = [pack_frame(Frame.REPORT, COOKIE, bytes([n]) * (n * 40)) for n in range(1, 100)]

    def send(part):
        for frame in part:
            channel.send(frame)

    threads = [threading.Thread(target=send, args=(frames[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inbox = Inbox(COOKIE, LIMIT)
    found = taken(inbox, drained(channel, theirs, sum(map(len, frames))))
    assert sorted(payload for _, payload in found) == sorted(frame[28:] for frame in frames)
    assert inbox.dropped == 0


def test_a_socket_whose_peer_is_gone_takes_nothing_and_raises_nothing(pair):
    channel, theirs = pair
    channel.send(bytes(100_000))
    theirs.close()
    channel.flush()
    assert channel.broken
    assert channel.send(b"more") == 0
    channel.latest(b"more")
    assert channel.waiting == 0
    assert channel.read() == -1
