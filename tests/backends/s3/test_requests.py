"""How many requests a call sends, which are sent again, and how stores are listed."""

from __future__ import annotations

import logging
import socket
import time
from threading import Event

import pytest

from l3store import page, registry
from l3store.abc import call_deadline
from l3store.backends.s3 import backend
from l3store.backends.s3.crew import Lease
from l3store.errors import (
    BackendTimeout,
    BackendUnavailable,
    CapacityError,
    ConfigError,
)
from l3store.testing.kit import Pages
from tests.backends.s3._stub import Stub


def stored(store, count: int, total: int = 128) -> Pages:
    """`total` pages of which the first `count` are stored."""
    pages = Pages(count=total, size=256)
    store.page_set(pages.keys[:count], pages.sealed()[:count])
    return pages


@pytest.mark.parametrize(
    ("present", "requests", "rounds"), [(0, 16, 1), (77, 141, 3), (128, 128, 3), (15, 16, 1)]
)
def test_a_lookup_asks_in_growing_windows(
    stub, opened, client, monkeypatch, present, requests, rounds
):
    store = opened(client=client)
    pages = stored(store, present)
    asked, heads = [], store._requests.heads
    monkeypatch.setattr(
        store._requests, "heads", lambda *args, **more: asked.append(1) or heads(*args, **more)
    )
    stub.asked()
    assert store.batch_exists(pages.keys) == present
    counts = stub.asked()
    assert set(counts) == {"HEAD"}
    assert present < counts["HEAD"] + (present == 128) <= requests + (present == 128)
    assert len(asked) == rounds


def test_each_key_is_asked_once_in_one_round(stub, opened, client):
    store = opened(client=client)
    pages = stored(store, 77)
    stub.asked()
    assert store.exists_each(pages.keys) == [i < 77 for i in range(128)]
    assert stub.asked() == {"HEAD": 128}


def test_a_page_is_one_request_each_way(stub, opened, client):
    store = opened(client=client)
    pages = stored(store, 1, 1)  # and the place has its length
    fresh = Pages(count=20, size=256, seed=1)
    stub.asked()
    assert all(store.page_set(fresh.keys, fresh.sealed()))
    assert stub.asked() == {"PUT": 20}
    assert all(store.page_get(fresh.keys, fresh.room().pages))
    assert stub.asked() == {"GET": 20}
    assert store.page_set(pages.keys, pages.sealed()) == [True]
    assert stub.asked() == {"PUT": 1, "HEAD": 1}  # there, and as long as it must be
    assert None not in store.headers(fresh.keys)
    assert stub.asked() == {"GET": 20}
    assert all(store.delete(fresh.keys))
    assert stub.asked() == {"HEAD": 20, "DELETE": 1}


# -- answers that are no -----------------------------------------------------------------------

BUSY = [(503, "SlowDown"), (429, "TooManyRequests"), (500, "InternalError"), (503, "")]


@pytest.mark.parametrize(("status", "code"), BUSY)
def test_busy_is_asked_again_once(stub, opened, client, status, code):
    store = opened(client=client)
    pages = stored(store, 1, 1)
    for kind, call in (
        ("GET", lambda: store.page_get(pages.keys, pages.room().pages)),
        ("HEAD", lambda: store.exists_each(pages.keys)),
        ("PUT", lambda: store.page_set(pages.keys, pages.sealed())),
    ):
        stub.faults({"on": kind, "status": status, "code": code, "times": 1})
        assert call() == [True], kind
        stub.faults({"on": kind, "status": status, "code": code})
        stub.asked()
        with pytest.raises(BackendUnavailable, match=str(status)) as caught:
            call()
        assert code in str(caught.value) or kind == "HEAD"  # which has no body
        assert caught.value.done == ([False] if kind != "HEAD" else [])
        assert stub.asked() == {kind: 2}
        stub.faults()
        assert call() == [True]


def test_told_so_nothing_is_asked_again(stub, opened, client):
    store = opened(client=client, retries=0)
    pages = stored(store, 1, 1)
    stub.faults({"on": "GET", "status": 503, "code": "SlowDown", "times": 1})
    with pytest.raises(BackendUnavailable, match="SlowDown"):
        store.page_get(pages.keys, pages.room().pages)
    assert store.page_get(pages.keys, pages.room().pages) == [True]


def test_what_was_done_before_is_told(stub, opened, client):
    store = opened(client=client, concurrency=1)
    pages = stored(store, 6, 6)
    stub.faults({"on": "GET", "name": pages.keys[3], "status": 503, "code": "SlowDown"})
    room = pages.room()
    with pytest.raises(BackendUnavailable) as caught:
        store.page_get(pages.keys, room.pages)
    assert caught.value.done == [True] * 3 + [False] * 3
    assert pages.wrong(caught.value.done, room) == []
    fresh = Pages(count=6, size=256, seed=1)
    stub.faults({"on": "PUT", "name": fresh.keys[3], "status": 503, "code": "SlowDown"})
    with pytest.raises(BackendUnavailable) as caught:
        store.page_set(fresh.keys, fresh.sealed())
    assert caught.value.done == [True] * 3 + [False] * 3
    assert store.exists_each(fresh.keys) == caught.value.done


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "AccessDenied"), (404, "NoSuchBucket"), (403, "SignatureDoesNotMatch"),
     (400, "ExpiredToken"), (301, "PermanentRedirect"), (405, "MethodNotAllowed")],
)  # fmt: skip
def test_refused_is_the_configurations_fault_at_start_and_later_unavailable(
    stub, opened, client, status, code
):
    store = opened(client=client)
    pages = stored(store, 1, 1)
    stub.faults({"status": status, "code": code})
    with pytest.raises(ConfigError, match="region|redirect" if status == 301 else code):
        opened(client=client)
    with pytest.raises(BackendUnavailable):
        store.page_get(pages.keys, pages.room().pages)
    with pytest.raises(BackendUnavailable):
        store.page_set(pages.keys, pages.sealed())
    with pytest.raises(BackendUnavailable):
        store.health()


@pytest.mark.parametrize(
    ("status", "code"), [(507, "XMinioStorageFull"), (403, "QuotaExceeded"), (507, "")]
)
def test_full_is_told_page_by_page(stub, opened, client, status, code):
    store = opened(client=client)
    pages = Pages(count=4, size=256)
    stub.faults({"on": "PUT", "name": pages.keys[1], "status": status, "code": code})
    assert store.page_set(pages.keys, pages.sealed()) == [True, False, True, True]
    with pytest.raises(CapacityError) as caught:
        store.page_set(pages.keys[1:2], pages.sealed()[1:2])
    assert caught.value.done == [False]


def test_an_object_over_the_servers_limit_is_refused_with_its_reason(stub, opened, client):
    store = opened(client=client)
    pages = Pages(count=1, size=256)
    stub.faults({"on": "PUT", "name": pages.keys[0], "status": 400, "code": "EntityTooLarge"})
    with pytest.raises(BackendUnavailable, match="EntityTooLarge"):
        store.page_set(pages.keys, pages.sealed())


@pytest.mark.parametrize("how", ["refuse", "ignore"])
def test_a_server_without_conditions_replaces_pages(stub, opened, client, caplog, how):
    stub.faults({"on": "PUT", "conditions": how})
    store = opened(client=client)
    pages, newer = Pages(count=3, size=256), Pages(count=3, size=256)
    newer.payloads = [bytes(reversed(data)) for data in newer.payloads]
    with caplog.at_level(logging.WARNING):
        assert store.page_set(pages.keys, pages.sealed()) == [True] * 3
        assert store.page_set(newer.keys, newer.sealed()) == [True] * 3
    room = newer.room()
    assert store.page_get(newer.keys, room.pages) == [True] * 3
    assert newer.wrong([True] * 3, room) == []
    assert ("If-None-Match" in caplog.text) == (how == "refuse")
    wrong = Pages(count=1, size=999)
    with pytest.raises(ValueError, match="256"):
        store.page_set(wrong.keys, wrong.sealed())


# -- bodies that lie ---------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 5, 150, 300, 1000, 30_000, 60_000])
def test_a_body_that_is_cut_is_no_page(stub, opened, client, at):
    store = opened(client=client, retries=0)
    pages = Pages(count=1, size=60_000, segments=3)
    store.page_set(pages.keys, pages.sealed())
    room = pages.room()
    stub.faults({"on": "GET", "cut": at})
    with pytest.raises(BackendUnavailable) as caught:
        store.page_get(pages.keys, room.pages)
    assert caught.value.done == [False]
    assert room.intact()
    stub.faults()
    assert store.page_get(pages.keys, room.pages) == [True]


@pytest.mark.parametrize("more", [-100, -1, 1, 1000, 1 << 40])
def test_another_length_than_the_pages_touches_no_byte(stub, opened, client, more):
    store = opened(client=client)
    pages = Pages(count=1, size=60_000)
    store.page_set(pages.keys, pages.sealed())
    room = pages.room()
    stub.faults({"on": "GET", "name": pages.keys[0], "length": more})
    start = time.monotonic()
    assert store.page_get(pages.keys, room.pages) == [False]
    assert time.monotonic() - start < 10, "it waited for the body"
    assert room.untouched()


def test_a_body_that_trickles_ends_in_time_and_nothing_comes_late(stub, opened, client):
    store = opened(client=client, timeout="600ms")
    pages = Pages(count=2, size=60_000)
    store.page_set(pages.keys, pages.sealed())
    room = pages.room()
    stub.faults({"on": "GET", "trickle": 20_000})
    with pytest.raises(BackendTimeout):  # by its own time-out
        store.page_get(pages.keys, room.pages)
    room.reuse()
    start = time.monotonic()
    with call_deadline(0.1), pytest.raises(BackendTimeout):  # and by the call's deadline
        store.page_get(pages.keys, room.pages)
    assert time.monotonic() - start < 0.5
    room.reuse()
    time.sleep(1.0)
    assert room.untouched(), "memory was written after the call had returned"
    stub.faults()
    assert store.page_get(pages.keys, room.pages) == [True, True]


def test_a_body_that_comes_after_the_deadline_reaches_nobody(stub, opened, client, monkeypatch):
    """It does arrive, whole: what is written then would be the caller's memory."""
    store = opened(client=client, timeout="20s")
    pages = Pages(count=4, size=30_000)
    store.page_set(pages.keys, pages.sealed())
    room = pages.room()
    stub.faults({"on": "GET", "trickle": 100_000})
    stub.asked()
    with call_deadline(0.1), pytest.raises(BackendTimeout) as caught:
        store.page_get(pages.keys, room.pages)
    assert caught.value.done == [False] * 4
    room.reuse()
    assert stub.asked() == {"GET": 4}
    time.sleep(1.0)
    assert room.untouched(), "memory was written after the call had returned"


@pytest.mark.parametrize("when", ["after it was read", "after it was looked at"])
def test_a_good_page_that_takes_a_damaged_ones_place_stays(stub, opened, client, monkeypatch, when):
    store = opened(client=client)
    pages = stored(store, 1, 1)
    page_set, head = store._requests.client.put, store._requests.client.head
    replaced = []

    def replace() -> None:
        if not replaced:
            replaced.append(1)
            page_set(store._names.page(pages.keys[0]), pages.sealed()[0], Lease(), create=False)

    def looked(name):
        found = head(name)
        replace()
        return found

    def check(*_) -> bool:  # what was read is damaged
        if when == "after it was read":
            replace()
        return False

    if when == "after it was looked at":
        monkeypatch.setattr(store._requests.client, "head", looked)
    else:  # a server that does not heed If-Match
        stub.faults({"on": "DELETE", "conditions": "ignore"})
    assert store.page_get(pages.keys, pages.room().pages, check) == [False]
    assert replaced
    assert store.exists_each(pages.keys) == [True]


# -- listing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fanout", [0, 1, 2])
def test_a_store_of_more_pages_than_one_answer_lists_is_listed_whole(stub, opened, fanout):
    store = opened(fanout=fanout)
    one, two = Pages(count=1200, size=1), Pages(count=30, size=7, place="b/kv/all", seed=1)
    for pages in (one, two):
        assert all(store.page_set(pages.keys, pages.sealed()))
    store.put_meta("a", b"x")
    found = list(store.scan())
    assert len(found) == len(set(found))
    assert set(found) == {*one.keys, *two.keys}
    assert sorted(store.scan(two.place)) == sorted(two.keys)
    assert [(u.place, u.pages, u.payload_bytes) for u in store.usage()] == [
        ("b/kv/all", 30, 210), (one.place, 1200, 1200),
    ]  # fmt: skip
    assert store.delete(one.keys) == [True] * 1200
    assert sorted(store.scan()) == sorted(two.keys)
    assert store.list_meta() == ["a"]


def test_a_list_is_given_up_at_the_deadline(stub, opened):
    store = opened()
    stub.faults({"on": "LIST", "trickle": 100})
    start = time.monotonic()
    with call_deadline(0.2), pytest.raises(BackendTimeout):
        list(store.scan())
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("token", ["", "there"])
def test_a_list_that_does_not_say_how_it_goes_on_is_no_whole_list(stub, opened, token):
    store = opened()
    pages = Pages(count=1001, size=1)
    assert all(store.page_set(pages.keys, pages.sealed()))
    stub.faults({"on": "LIST", "token": token})
    for call in (lambda: list(store.scan()), store.usage):
        with call_deadline(20), pytest.raises(BackendUnavailable, match="where it goes on"):
            call()


def test_nothing_outside_the_prefix_is_listed(stub, opened):
    store = opened()
    stub.faults({"on": "LIST", "unless": store._names.root, "status": 403, "code": "No"})
    assert store.details()["bucket"] == "bucket"
    assert list(store.scan()) == []
    assert store.list_meta() == []


@pytest.mark.parametrize(("code", "says"), [("AccessDenied", "AccessDenied"), ("NoSuchKey", "")])
def test_what_is_kept_of_several_that_shall_go_is_an_error(stub, opened, code, says):
    store = opened()
    pages = stored(store, 3, 3)
    stub.faults({"on": "DELETE", "kept": code, "key": pages.keys[1]})
    if not says:  # another process was faster
        assert store.delete(pages.keys) == [True] * 3
        return
    with pytest.raises(BackendUnavailable, match=says):
        store.delete(pages.keys)
    assert store.exists_each(pages.keys) == [False, True, False]


def test_what_could_not_be_removed_for_now_is_removed_in_a_second_try(stub, opened):
    store = opened()
    pages = stored(store, 3, 3)
    stub.faults({"on": "DELETE", "kept": "InternalError", "key": pages.keys[1], "times": 1})
    assert store.delete(pages.keys) == [True] * 3
    assert store.exists_each(pages.keys) == [False] * 3


# -- the rest ----------------------------------------------------------------------------------


def test_small_pages_are_told_once_and_what_would_do(opened, caplog):
    store = opened()
    pages = Pages(count=2, size=(64 << 10) - 128)
    with caplog.at_level(logging.WARNING):
        for page_set in (pages.keys[:1], pages.keys[1:]):
            store.page_set(page_set, pages.sealed()[:1])
    assert caplog.text.count("8 times as large would do") == 1
    large = Pages(count=1, size=512 << 10, place="c/kv/all")
    caplog.clear()
    opened("large").page_set(large.keys, large.sealed())
    assert not caplog.text


def test_a_page_over_the_limit_of_s3_is_refused(opened):
    store = opened()
    store_limit = store.capabilities.max_page_bytes
    assert store_limit == 5 << 30
    header, one = memoryview(bytearray(page.HEADER_BYTES)), memoryview(bytearray(1 << 20))
    segments = [header, *[one] * 5120]
    with pytest.raises(ValueError, match=str(store_limit)):
        store.page_set(Pages(count=1).keys, [segments])


def test_a_write_whose_deadline_is_near_stores_no_foreign_bytes(stub, opened, client):
    """The caller reuses the page right after the error; what arrives is the page as it was."""
    store = opened(client=client, timeout="5s")
    stored(store, 1, 1)
    pages = Pages(count=1, size=256, seed=3)
    sealed = pages.sealed()
    stub.faults({"on": "PUT", "trickle": 100})  # the answer is late
    with call_deadline(0.1), pytest.raises(BackendTimeout):
        store.page_set(pages.keys, sealed)
    for segments in sealed:
        for piece in segments:
            piece[:] = bytes(piece.nbytes)
    stub.faults()
    room = pages.room()
    done = store.page_get(pages.keys, room.pages, page.opener(pages.keys))
    assert pages.wrong(done, room) == []


def test_after_a_failure_nobody_holds_the_callers_memory(stub, opened):
    store = opened(timeout="300ms")  # boto3 never has it
    pages = Pages(count=1, size=1 << 20)
    own = [bytearray(page.HEADER_BYTES), bytearray(1 << 20)]
    views = [memoryview(one) for one in own]
    store.page_set(pages.keys, [views])
    stub.faults({"on": "PUT", "trickle": 100})  # the answer is late
    with call_deadline(20), pytest.raises(BackendTimeout) as caught:
        store.page_set(pages.keys, [views])  # lent: there is time enough
    for one, view in zip(own, views, strict=True):
        view.release()
        one.append(0)  # a BufferError when it is held
    assert caught.value.done == [False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"format": 2, "kind": "s3", "fanout": 2}', "format 2; this version reads format 1"),
        (b'{"format": 1, "kind": "file", "fanout": 2}', "kind 'file'"),
        (b'{"format": 1, "kind": "s3", "fanout": 0}', "say fanout=0"),
        (b"{}", "does not describe a store"),
        (b"", "does not describe a store"),
    ],
)
def test_a_store_of_another_kind_is_refused(opened, client, text, says):
    place = f"kind-{text.hex()}-{client}"
    store = opened(place)
    store._requests.single(
        lambda lease: store._requests.put_small(store._names.marker, text, lease)
    )
    with pytest.raises(ConfigError, match=says):
        opened(place, client=client)


def test_what_the_url_says_wins_over_the_environment(opened, client, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    monkeypatch.setenv("AWS_S3_EXPRESS", "true")
    opened(client=client).health()


def test_opening_ends_though_nobody_says_where_a_host_is(stub, monkeypatch):
    """boto3 has no time-out for that; what waits stays behind."""
    answers = Event()
    monkeypatch.setattr(backend, "_OPENING", 0.3)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.wait(60) and [])
    url = stub.url("unknown", client="boto3", timeout="20ms", connect_timeout="20ms")
    start = time.monotonic()
    try:
        with pytest.raises(BackendTimeout):
            registry.open(url)
        assert time.monotonic() - start < 20
    finally:
        answers.set()


def test_read_only_makes_no_store(opened):
    with pytest.raises(ConfigError, match="is not a store"):
        opened(mode="ro")
    opened()
    assert opened(mode="ro").list_meta() == []


def test_a_full_server_takes_what_fits(tmp_path):
    with Stub(tmp_path, capacity=3 * 1128) as small, registry.open(small.url()) as store:
        pages = Pages(count=5, size=1000)
        done = store.page_set(pages.keys, pages.sealed())
        assert sum(done) == 3
        assert store.exists_each(pages.keys) == done
