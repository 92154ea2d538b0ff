"""Pages over a wire, whatever the replies are and however they are cut on their way."""

from __future__ import annotations

import time

import pytest

from l3store import registry
from l3store.abc import call_deadline
from l3store.backends.redis.pages import Odd, read_pages, write_pages
from l3store.backends.redis.refusals import Refused
from l3store.backends.redis.wire import OutOfStep
from l3store.testing.kit import Pages

PAGES = Pages(count=5, size=1000, segments=3)
WHOLE = 1128
MISS, OOM = b"$-1\r\n", b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"


def bulk(data):
    return b"$%d\r\n%s\r\n" % (len(data), data)


def good(i):
    return bulk(PAGES.stored(i))


def read(peer, room, *, window=1 << 20):
    replies = read_pages(peer.wire, window, [b"GET"] * 5, room.pages, [WHOLE] * 5)
    return [str(reply) if isinstance(reply, Refused) else reply for reply in replies]


def odd(data):
    return Odd(len(data), data[:128])


CASES = {
    "all there": ([good(i) for i in range(5)], [True] * 5),
    "none there": ([MISS] * 5, [False] * 5),
    "a miss at each end": ([MISS, good(1), good(2), good(3), MISS], [False, *[True] * 3, False]),
    "a miss between": ([good(0), MISS, MISS, good(3), good(4)], [True, False, False, True, True]),
    "an error between": (
        [good(0), b"-LOADING it is\r\n", good(2), MISS, good(4)],
        [True, "LOADING it is", True, False, True],
    ),
    "empty values": ([bulk(b"")] * 5, [odd(b"")] * 5),
    "an empty value last": ([*map(good, range(4)), bulk(b"")], [*[True] * 4, odd(b"")]),
    "a byte too short": (
        [good(0), bulk(PAGES.stored(1)[:-1]), good(2), good(3), good(4)],
        [True, odd(PAGES.stored(1)[:-1]), True, True, True],
    ),
    "a head that begins as a page's does": (
        [good(0), good(1), good(2), good(3), bulk(b"x" * 112)],
        [True, True, True, True, odd(b"x" * 112)],
    ),
    "far too long": (
        [bulk(b"y" * 200_000), good(1), bulk(b"z" * 70_000), good(3), MISS],
        [odd(b"y" * 200_000), True, odd(b"z" * 70_000), True, False],
    ),
    "replies within a page": (
        [bulk(b"\r\n$1128\r\n" * 3), good(1), good(2), MISS, good(4)],
        [odd(b"\r\n$1128\r\n" * 3), True, True, False, True],
    ),
}


@pytest.mark.parametrize("piece", [None, 1, 2, 3, 5, 7, 64, 1129, 1133, 1135])
@pytest.mark.parametrize("case", CASES)
def test_every_reply_is_told_apart_however_it_is_cut(peer, case, piece):
    said, expected = CASES[case]
    if piece is not None and piece < 64 and sum(map(len, said)) > 20_000:
        piece *= 1000
    peer.says(b"".join(said) + b"+OK\r\n", piece)
    room = PAGES.room()
    found = read(peer, room)
    assert found == expected
    assert [i for i in range(5) if expected[i] is True and room.page(i) != PAGES.stored(i)] == []
    assert room.intact()
    assert peer.wire.reply() == b"OK", "the stream is out of step"
    assert peer.wire.in_step()


@pytest.mark.parametrize("cut", range(10))
@pytest.mark.parametrize(
    ("then", "told"),
    [
        (good(1), True), (MISS, False), (bulk(b""), odd(b"")), (bulk(b"x"), odd(b"x")),
        (bulk(b"x" * 1129), odd(b"x" * 1129)),
    ],
)  # fmt: skip
def test_a_head_that_comes_in_two_parts_is_one(peer, then, told, cut):
    """The first part behind the page before it, the rest only when that page was taken."""
    room = PAGES.room()
    replies = read_pages(peer.wire, 1 << 20, [b"GET"] * 5, room.pages, [WHOLE] * 5)
    peer.says(good(0) + then[:cut])
    assert next(replies) is True
    peer.says(then[cut:] + b"".join(map(good, range(2, 5))) + b"+OK\r\n")
    assert list(replies) == [told, True, True, True]
    assert [i for i in (0, 2, 3, 4) if room.page(i) != PAGES.stored(i)] == []
    assert peer.wire.reply() == b"OK", "the stream is out of step"


@pytest.mark.parametrize("tls", [False, True])
def test_an_empty_piece_of_a_page_is_read_over(request, server, tls):
    pages, url = Pages(count=3, size=70_000, segments=2), server.url
    with registry.open(request.getfixturevalue("tls_url") if tls else url) as store:
        _with_empty_pieces(store, pages)


def _with_empty_pieces(store, pages):
    sealed = [(page[0], page[1][:0], page[1], page[2][:0], page[2]) for page in pages.sealed()]
    assert store.page_set(pages.keys, sealed) == [True] * 3
    room = pages.room()
    into = [(page[0], page[1][:0], page[1], page[2], page[2][:0]) for page in room.pages]
    assert store.page_get(pages.keys, into) == [True] * 3
    assert not pages.wrong([True] * 3, room)


@pytest.mark.parametrize("window", [1, 2000, 3000, 1 << 20])
def test_no_more_is_asked_for_than_the_window_holds(peer, window):
    replies = read_pages(peer.wire, window, [b"GET"] * 5, PAGES.room().pages, [WHOLE] * 5)
    at_once = max(1, min(5, window // WHOLE))
    peer.says(good(0))
    assert next(replies) is True
    assert peer.heard_all() == b"GET" * at_once


@pytest.mark.parametrize(
    "said",
    [
        b"+OK\r\n", b":1\r\n", b"$x\r\n", b"*1\r\n$-1\r\n", b"GET\r\n", b"$-2\r\n",
        bulk(bytes(WHOLE))[:-2] + b"xx", bulk(bytes(99))[:-2] + b"xx",
    ],
)  # fmt: skip
def test_what_is_no_reply_is_out_of_step(peer, said):
    peer.says(said * 5)
    with pytest.raises(OutOfStep):
        read(peer, PAGES.room())


def test_a_line_that_never_ends_is_out_of_step(peer):
    peer.says(b"$" + b"1" * 200_000)
    with pytest.raises(OutOfStep):
        read(peer, PAGES.room())
    peer.sock.close()


@pytest.mark.parametrize("at", [0, 1, 6, 7, 100, WHOLE + 7, WHOLE + 8, WHOLE + 9])
def test_a_connection_that_ends_is_an_error(peer, at):
    peer.says((good(0) + good(1))[:at], end=True)
    replies = read_pages(peer.wire, 1 << 20, [b"GET"] * 5, PAGES.room().pages, [WHOLE] * 5)
    with pytest.raises(OSError, match=r".+"):
        list(replies)


@pytest.mark.parametrize("said", [b"", good(0)[:3], good(0)[:500], good(0)])
def test_a_silent_server_is_a_time_out(new_peer, said):
    peer = new_peer(timeout=0.2)
    peer.says(said)
    start = time.monotonic()
    with pytest.raises((TimeoutError, BlockingIOError)):
        read(peer, PAGES.room())
    assert 0.1 < time.monotonic() - start < 5


def test_the_deadline_of_the_call_is_kept_where_it_is_sooner(new_peer):
    with call_deadline(0.2):
        peer = new_peer(timeout=60)
        start = time.monotonic()
        with pytest.raises((TimeoutError, BlockingIOError)):
            read(peer, PAGES.room())
        assert time.monotonic() - start < 5


def test_a_slow_server_is_waited_for_as_long_as_bytes_come(new_peer):
    """Twice as long as the time-out, in one page."""
    peer = new_peer(timeout=1.0)
    peer.says(good(0), piece=-(-WHOLE // 30), pause=0.07)
    start = time.monotonic()
    room = PAGES.room()
    assert list(read_pages(peer.wire, 1, [b"GET"], room.pages[:1], [WHOLE])) == [True]
    assert time.monotonic() - start > 2.0
    assert (room.page(0) == PAGES.stored(0)) is True


def test_a_deadline_ends_also_what_comes_slowly(new_peer):
    with call_deadline(0.5):
        peer = new_peer(timeout=60)
        peer.says(b"".join(map(good, range(5))), piece=60, pause=0.05)
        start = time.monotonic()
        with pytest.raises((TimeoutError, BlockingIOError)):
            read(peer, PAGES.room())
        assert time.monotonic() - start < 3
    peer.sock.close()


def test_bytes_that_come_unasked_end_the_connection(peer):
    peer.says(b"".join(map(good, range(5))) + MISS)
    room = PAGES.room()
    assert read(peer, room) == [True] * 5
    peer.wire.ahead += b"$"
    assert not peer.wire.in_step()


# -- writing --------------------------------------------------------------------------------------


def write(peer, count=5, window=1 << 20):
    sealed = [PAGES.sealed()[i % 5] for i in range(count)]
    requests = [(b"<", b">")] * count
    return write_pages(peer.wire, window, requests, sealed, [WHOLE] * count)


def test_what_is_sent_is_the_page_between_its_words(peer):
    peer.says(b"+OK\r\n" * 5)
    assert list(write(peer)) == [None] * 5
    expected = b"".join(b"<" + PAGES.stored(i) + b">" for i in range(5))
    assert (peer.heard(len(expected)) == expected) is True


@pytest.mark.parametrize("piece", [1, 4, 6, 100])
def test_refusals_are_those_of_their_pages(peer, piece):
    peer.says(b"+OK\r\n" + OOM + OOM + b"+OK\r\n-MOVED 1 h:1\r\n", piece)
    codes = [error and error.code for error in write(peer)]
    assert codes == [None, "OOM", "OOM", None, "MOVED"]


def test_no_more_is_sent_than_the_window_holds(peer):
    replies = write(peer, window=2 * WHOLE)
    peer.says(b"+OK\r\n")
    assert next(replies) is None
    assert len(peer.heard_all()) == 2 * (WHOLE + 2)
