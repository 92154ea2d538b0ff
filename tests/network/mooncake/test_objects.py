"""What stands in Mooncake beside our pages, or in place of them."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from l3store import registry
from l3store.errors import BackendTimeout, BackendUnavailable, CapacityError, ConfigError
from l3store.servers.process import wait_until
from l3store.testing.faults import DOWN, get, until_well
from l3store.testing.kit import PLACE, Pages
from l3store.testing.proxy import Proxy

PAGES = Pages(count=4, size=4096)


@pytest.fixture(params=["sessions", "plain"])
def url(request, url):
    """Both ways to move pages."""
    return f"{url}&calls={request.param}"


@pytest.fixture
def prefix(url):
    return url.rpartition("prefix=")[2].partition("&")[0]


@pytest.fixture
def name(prefix):
    return lambda i: f"{prefix}/page/{PAGES.keys[i]}"


def test_evicted_between_exists_and_get_is_a_miss(raw, bare, name):
    raw.page_set(PAGES.keys, PAGES.sealed())
    assert raw.batch_exists(PAGES.keys) == 4
    assert bare.remove(name(1))
    assert get(raw, PAGES)[0] == [True, False, True, True]


def test_a_page_that_is_read_twice_in_a_call_arrives_twice(raw):
    """Of a name that stands twice in a plain call the library fills one."""
    raw.page_set(PAGES.keys, PAGES.sealed())
    order = [3, 0, 3, 3, 1, 2, 0]
    room = Pages(count=7, size=4096).room()
    assert raw.page_get([PAGES.keys[i] for i in order], room.pages) == [True] * 7
    assert [n for n, i in enumerate(order) if room.payload(n) != PAGES.payloads[i]] == []


@pytest.mark.parametrize("change", [-4200, -128, -1, 1, 5000])
def test_replaced_by_a_shorter_or_longer_one_is_a_miss_and_heals(raw, bare, name, change):
    raw.page_set(PAGES.keys, PAGES.sealed())
    good = PAGES.stored(2)
    bare.write(name(2), good[:change] if change < 0 else good + bytes(change))
    assert get(raw, PAGES)[0] == [True, True, False, True]
    assert raw.exists_each(PAGES.keys) == [True, True, False, True], "it was not removed"
    assert raw.page_set(PAGES.keys, PAGES.sealed()) == [True] * 4
    assert get(raw, PAGES)[0] == [True] * 4


def test_headers_of_pages_that_are_shorter_than_one(raw, bare, name):
    raw.page_set(PAGES.keys, PAGES.sealed())
    bare.write(name(1), b"short")
    found = raw.headers(PAGES.keys)
    assert found == [PAGES.stored(0)[:128], b"short", PAGES.stored(2)[:128], PAGES.stored(3)[:128]]


def test_foreign_objects_are_not_listed_and_not_touched(raw, bare, prefix):
    foreign = [
        f"{prefix}/page/no-key", f"{prefix}/page/{PAGES.keys[0]}/more", f"{prefix}/other",
        f"{prefix}x/page/{PAGES.keys[1]}", f"x{prefix}/page/{PAGES.keys[1]}", PAGES.keys[2],
    ]  # fmt: skip
    for name in foreign:
        bare.write(name, b"foreign")
    raw.page_set(PAGES.keys[:1], PAGES.sealed()[:1])
    assert list(raw.scan()) == PAGES.keys[:1]
    assert list(raw.scan(PLACE)) == PAGES.keys[:1]
    assert [usage.pages for usage in raw.usage()] == [1]
    assert raw.exists_each(PAGES.keys) == [True, False, False, False]
    assert raw.delete(PAGES.keys) == [True, False, False, False]
    assert [bare.read(name) for name in foreign] == [b"foreign"] * len(foreign)


def test_a_listing_that_is_cut_is_an_error_and_not_a_short_one(mooncake_server, url, prefix):
    with Proxy(("127.0.0.1", mooncake_server.admin_port)) as proxy:
        admin = f"admin={proxy.port}"
        with registry.open(url.replace(f"admin={mooncake_server.admin_port}", admin)) as store:
            store.page_set(PAGES.keys, PAGES.sealed())
            assert sorted(store.scan()) == sorted(PAGES.keys)
            whole = len(mooncake_server.ask("/get_all_keys"))
            for at in (whole, whole // 2 + 150):  # of the names and what stands before them
                proxy.cut_after(at, each=True)
                with pytest.raises(BackendUnavailable, match="admin port"):
                    list(store.scan())
                proxy.restore()
            assert len(list(store.scan())) == 4


def test_a_page_whose_length_nobody_tells_is_not_removed(raw, bare, name, monkeypatch):
    raw.page_set(PAGES.keys, PAGES.sealed())
    bare.write(name(1), b"short")
    monkeypatch.setattr(raw._pages, "size", lambda key: -901)
    with suppress(BackendTimeout):  # of a plain call it is asked before
        assert get(raw, PAGES)[0] == [True, False, True, True]
    assert bare.read(name(1)) == b"short"


def test_a_removal_that_fails_in_the_middle_says_what_is_removed(raw, monkeypatch):
    raw.page_set(PAGES.keys, PAGES.sealed())
    expected = [None, bytes(128), None, None]  # the second one is another page
    call = raw._client.call

    def cut(name, *arguments):
        return [0, -800, 0] if name == "batch_remove" else call(name, *arguments)

    monkeypatch.setattr(raw._client, "call", cut)
    with pytest.raises(BackendUnavailable) as caught:
        raw.delete(PAGES.keys, expected)
    assert caught.value.done == [True, False, False, True]


def test_a_store_of_another_format_is_refused(url, raw, bare, prefix):
    """Its marker is written as ours is, with another number."""
    marker = bare.read(f"{prefix}/store")
    from l3store.backends.mooncake.small import framed

    bare.write(f"{prefix}/store", framed(b'{"kind":"mooncake","format":2}'))
    for mode in ("", "&mode=ro"):
        with pytest.raises(ConfigError, match=r"format 2.*reads format 1"):
            registry.open(url + mode)
    bare.write(f"{prefix}/store", framed(b"[]"))
    with pytest.raises(ConfigError, match="describes no store"):
        registry.open(url)
    bare.write(f"{prefix}/store", b"somebody else's")
    with pytest.raises(BackendUnavailable, match="no object of this store"):
        registry.open(url)
    bare.write(f"{prefix}/store", marker)
    registry.open(url).close()


def test_what_is_known_of_a_store_is_never_evicted(mooncake_server, raw):
    """However many pages come after it."""
    raw.put_meta("model", b"described")
    stored = 0
    while stored < 3 * (64 << 20):
        pages = Pages(count=16, size=1 << 20, seed=stored)
        with suppress(CapacityError):
            raw.page_set(pages.keys, pages.sealed())
        stored += 16 << 20
    names = mooncake_server.keys()
    prefix = raw._options.prefix
    assert sum("/page/" in name for name in names) < 64, "nothing was evicted"
    assert raw.get_meta("model") == b"described"
    assert raw.list_meta() == ["model"]
    assert {f"{prefix}/store", f"{prefix}/length/{PLACE}"} <= set(names)


def test_a_length_that_is_damaged_is_told(raw, bare, prefix):
    bare.write(f"{prefix}/length/{PLACE}", b"4096")
    with pytest.raises(BackendUnavailable, match="no object of this store"):
        raw.page_set(PAGES.keys, PAGES.sealed())


def test_after_the_master_was_emptied_places_may_have_other_lengths(mooncake_server, raw):
    """And marker, lengths and names are made again."""
    raw.page_set(PAGES.keys, PAGES.sealed())
    raw.put_meta("model", b"x")
    mooncake_server.restart()
    assert raw.get_meta("model") is None
    assert raw.exists_each(PAGES.keys) == [False] * 4
    longer = Pages(count=2, size=9000)
    assert raw.page_set(longer.keys, longer.sealed()) == [True, True]
    with pytest.raises(ValueError, match="9000"):
        raw.page_set(PAGES.keys, PAGES.sealed())
    raw.put_meta("model", b"y")
    assert raw.list_meta() == ["model"]
    names = mooncake_server.keys()
    assert sum(name.endswith("/store") for name in names) == 1


_KILLED_WITHIN_A_PUT = """
import os, sys
from l3store.servers.mooncake_client import BareClient
client = BareClient(int(sys.argv[1]))
codes = client.store.batch_put_session_start(sys.argv[2:], [4224] * (len(sys.argv) - 2))
assert codes == [0] * len(codes), codes
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_client_has_begun_is_stored_by_the_next_one(mooncake_server, raw, name):
    """It is not visible, and a put of it is no success before the master has given it up."""
    names = [name(i) for i in range(4)]
    command = [sys.executable, "-c", _KILLED_WITHIN_A_PUT, str(mooncake_server.port), *names]
    assert subprocess.run(command, timeout=30).returncode == -9
    assert raw.exists_each(PAGES.keys) == [False] * 4
    assert raw.page_set(PAGES.keys, PAGES.sealed()) == [True] * 4
    assert get(raw, PAGES)[0] == [True] * 4


def test_what_another_client_is_writing_is_a_miss_and_not_called_stored(raw, bare, name):
    started = bare.store.batch_put_session_start([name(0)], [4224])
    assert started == [0]
    assert get(raw, PAGES)[0] == [False] * 4
    assert raw.exists_each(PAGES.keys) == [False] * 4
    assert raw.delete(PAGES.keys[:1]) == [False]
    assert bare.store.batch_put_session_revoke([name(0)]) == [0]
    assert raw.page_set(PAGES.keys, PAGES.sealed()) == [True] * 4


def test_threads_that_move_the_same_pages_do_not_disturb_each_other(raw):
    """A session belongs to a name: two of one name would end each other."""
    pages = Pages(count=24, size=200_000, segments=2)
    sealed, faults = pages.sealed(), []
    raw.page_set(pages.keys, sealed)

    def work(number):
        for _ in range(6):
            room = pages.room()
            done = raw.page_get(pages.keys, room.pages)
            fresh = Pages(count=8, size=200_000, segments=2, seed=1)
            stored = raw.page_set(fresh.keys, fresh.sealed())
            if not all(done) or pages.wrong(done, room) or not all(stored):
                faults.append((number, done, stored))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == []
    assert not raw._client.sessions._names


def test_a_name_that_was_left_in_a_session_is_moved_the_plain_way(mooncake_server, raw):
    """The master stood still when the session was to end."""
    sessions, call = raw._client.sessions, raw._client.sessions._call

    def frozen(name, *arguments):
        if name == "batch_put_session_end":
            mooncake_server.freeze()
        return call(name, *arguments)

    sessions._call = frozen
    try:
        with suppress(BackendUnavailable, BackendTimeout):
            raw.page_set(PAGES.keys, PAGES.sealed())
    finally:
        sessions._call = call
        mooncake_server.thaw()
    until_well(raw, PAGES)
    until_well(raw, PAGES)


def test_nothing_is_sent_behind_a_call_that_was_not_answered(mooncake_server, raw):
    """A master that stood still would do it when it goes on, long after it was told to fail."""
    until_well(raw, PAGES)
    mooncake_server.freeze()
    try:
        with pytest.raises(DOWN):
            raw.batch_exists(PAGES.keys)
        for _ in range(2):
            with pytest.raises(DOWN):
                raw.delete(PAGES.keys)
    finally:
        mooncake_server.thaw()
    wait_until(lambda: raw.batch_exists(PAGES.keys) >= 0, "the master answers")
    assert get(raw, PAGES)[0] == [True] * 4


def test_a_descriptor_that_is_being_replaced_is_listed_and_one_that_is_gone_is_not(
    raw, bare, prefix
):
    for name in ("one", "two", "three"):
        raw.put_meta(name, b"described")
    for name in ("one", "three"):
        assert bare.remove(f"{prefix}/meta/{name}")
    assert bare.store.batch_put_session_start([f"{prefix}/meta/one"], [100]) == [0]
    assert raw.list_meta() == ["one", "two"]
    assert bare.store.batch_put_session_revoke([f"{prefix}/meta/one"]) == [0]
    assert raw.list_meta() == ["two"]


def test_descriptors_of_two_processes_are_all_listed(url, raw):
    """Both add names at the same time."""
    code = """
import sys
from l3store import registry
with registry.open(sys.argv[1]) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(20):
        store.put_meta(f"theirs-{i}", b"theirs")
        store.put_meta("both", b"t" * 1000)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "ready\n"
        print(file=other.stdin, flush=True)
        for i in range(20):
            raw.put_meta(f"ours-{i}", b"ours")
            raw.put_meta("both", b"o" * 900)
            assert raw.get_meta("both") in (b"o" * 900, b"t" * 1000)
        other.stdin.close()
        assert other.wait(30) == 0
    names = [f"{who}-{i}" for who in ("ours", "theirs") for i in range(20)]
    assert raw.list_meta() == sorted([*names, "both"])
    assert raw.get_meta("theirs-7") == b"theirs"
