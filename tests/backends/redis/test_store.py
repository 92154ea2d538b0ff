"""What the backend promises beyond the contract: eviction, small buffers, forks, warnings."""

from __future__ import annotations

import logging
import os
import random
import re
import socket
from pathlib import Path

import pytest

from l3store import registry
from l3store.backends.redis.refusals import Refused, at_open, typed
from l3store.errors import BackendTimeout, BackendUnavailable, ConfigError
from l3store.testing.kit import PLACE, Pages


@pytest.fixture
def limited(server):
    """Gives the server a limit and a policy, until the test's end."""

    def limit(pages, size, policy):
        used = server.info("memory")["used_memory"]
        server.command("CONFIG", "SET", "maxmemory-policy", policy)
        server.command("CONFIG", "SET", "maxmemory", used + pages * (size + 1000))

    yield limit
    server.command("CONFIG", "SET", "maxmemory", 0)
    server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")


# -- a server that is full ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
def test_what_a_batch_pushed_out_of_its_own_is_not_called_stored(server, limited, policy):
    limited(16, 60_000, policy)
    with registry.open(f"{server.url}?window=64KiB") as store:
        pages = Pages(count=60, size=60_000)
        done = store.page_set(pages.keys, pages.sealed())
        assert done == store.exists_each(pages.keys)
        assert 1 <= sum(done) < 30


def test_a_server_that_evicts_nothing_is_not_asked_twice(server):
    with registry.open(server.url) as store:
        pages = Pages(count=4)
        before = server.info("commandstats")
        store.page_set(pages.keys, pages.sealed())
        after = server.info("commandstats")
    assert "cmdstat_exists" not in after or before["cmdstat_exists"] == after["cmdstat_exists"]


def test_pages_that_are_there_are_not_sent_again(server):
    pages, more = Pages(count=4, size=100_000), Pages(count=6, size=100_000)
    with registry.open(server.url) as store:
        store.page_set(pages.keys, pages.sealed())
        before = server.info("stats")["total_net_input_bytes"]
        assert store.page_set(more.keys, more.sealed()) == [True] * 6
        assert server.info("stats")["total_net_input_bytes"] - before < 250_000


@pytest.mark.parametrize(
    ("policy", "options", "says"),
    [
        ("noeviction", "", "takes no more pages"),
        ("volatile-ttl", "", "option 'ttl' is 0"),
        ("volatile-ttl", "?ttl=1h", None),
        ("allkeys-lru", "", None),
        ("noeviction", "?mode=ro", None),
    ],
)
def test_a_policy_that_fills_up_is_warned_of(server, limited, caplog, policy, options, says):
    registry.open(server.url).close()
    limited(100, 60_000, policy)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        registry.open(f"{server.url}{options}").close()
    assert [says] == [says for m in caplog.messages if says in m] if says else not caplog.messages


def test_pages_are_looked_at_also_where_the_marker_was_evicted(server, limited, caplog):
    pages = Pages(count=3)
    with registry.open(server.url) as store:
        store.page_set(pages.keys, pages.sealed())
    server.command("DEL", "l3:store")
    with pytest.raises(ConfigError, match="is no store"):
        registry.open(f"{server.url}?mode=ro")
    limited(100, 60_000, "allkeys-lru")
    with registry.open(f"{server.url}?mode=ro") as store:
        assert store.exists_each(pages.keys) == [True] * 3
    assert "it was evicted, or" in caplog.text
    assert server.command("EXISTS", "l3:store") == 0


def test_an_access_list_may_keep_the_configuration_and_scripts_from_us(server, limited):
    limited(8, 60_000, "allkeys-lru")
    server.command("ACL", "SETUSER", "poor", "on", ">secret", "~l3:*", "+@all", "-config")
    url = f"redis://poor:secret@127.0.0.1:{server.port}?window=64KiB"
    try:
        with registry.open(url) as store:
            pages = Pages(count=20, size=60_000)
            done = store.page_set(pages.keys, pages.sealed())  # INFO tells that it evicts
            assert done == store.exists_each(pages.keys)
            assert store.details()["maxmemory-policy"] == "allkeys-lru"
    finally:
        server.command("ACL", "DELUSER", "poor")


# -- asking ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98, 1.0])
def test_holes_anywhere_are_told_for_any_number_of_keys(server, share):
    pages, rng = Pages(count=500, size=64), random.Random(share)
    with registry.open(server.url) as store:
        there = [rng.random() < share for _ in range(500)]
        kept = [i for i in range(500) if there[i]]
        sealed = pages.sealed()
        if kept:
            store.page_set([pages.keys[i] for i in kept], [sealed[i] for i in kept])
        for count in (1, 127, 128, 129, 500):
            asked = pages.keys[:count] * 2
            assert store.exists_each(asked) == there[:count] * 2
            run = (there[:count] * 2 + [False]).index(False)
            assert store.batch_exists(asked) == run


# -- damage ----------------------------------------------------------------------------------------


def test_a_damaged_page_that_cannot_be_removed_is_a_miss_all_the_same(server, caplog):
    """Here: as an access list forbids the script."""
    server.command("ACL", "SETUSER", "poor", "on", ">secret", "~l3:*", "+@all", "-eval")
    pages = Pages(count=3)
    try:
        with registry.open(f"redis://poor:secret@127.0.0.1:{server.port}") as store:
            store.page_set(pages.keys, pages.sealed())
            server.command("SETRANGE", f"l3:{pages.keys[1]}", 500, b"damage")
            assert store.page_get(pages.keys, pages.room().pages) == [True, False, True]
            assert "NOPERM" in caplog.text
    finally:
        server.command("ACL", "DELUSER", "poor")


def test_a_place_that_has_another_length_by_now_is_the_callers_mistake(server):
    """The server was emptied, and another process stored longer pages meanwhile."""
    pages, longer = Pages(count=2), Pages(count=2, size=5000)
    with registry.open(server.url) as store, registry.open(server.url) as other:
        store.page_set(pages.keys, pages.sealed())
        server.command("FLUSHALL")
        other.page_set(longer.keys, longer.sealed())
        with pytest.raises(ValueError, match="5000 payload bytes"):
            store.page_get(pages.keys, pages.room().pages)
        assert other.page_get(longer.keys, longer.room().pages) == [True, True]


def test_what_the_server_has_lost_is_made_again_by_who_stores(server):
    """The length of a place, and what says that this is a store."""
    pages, more = Pages(count=2), Pages(count=2, seed=1)
    with registry.open(server.url) as store:
        store.page_set(pages.keys, pages.sealed())
        marker = server.command("GET", "l3:store")
        server.command("FLUSHALL")
        store.page_set(more.keys, more.sealed())
        assert server.command("HGET", "l3:lengths", PLACE) == b"4096"
        assert server.command("GET", "l3:store") == marker


def test_a_damaged_length_is_named(server):
    pages = Pages(count=1)
    with registry.open(server.url) as store:
        server.command("HSET", "l3:lengths", PLACE, "many")
        with pytest.raises(BackendUnavailable, match=rf"field {PLACE} of l3:lengths is damaged"):
            store.page_get(pages.keys, pages.room().pages)


@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_the_rights_that_the_manual_names_will_do(server, mode):
    page = Path(__file__).parents[3] / "docs" / "backends" / "redis.md"
    (rights,) = re.findall(r"^\*\*Rights\.\*\*.*?\n\n", page.read_text(), re.M | re.S)
    writing, ttl, reading, limits, *_ = re.findall(r"`([~+][^`]+)`", rights)
    words = f"{writing} {ttl}" if mode == "rw" else f"~l3:* {reading}"
    pages, ours = Pages(count=3), f"redis://poor:secret@127.0.0.1:{server.port}"
    with registry.open(server.url) as store:
        store.page_set(pages.keys[:2], pages.sealed()[:2])
    server.command("ACL", "SETUSER", "poor", "reset", "on", ">secret", *words.split(), limits)
    try:
        with registry.open(f"{ours}?mode={mode}&ttl=1h") as store:
            store.health()
            assert store.page_get(pages.keys, pages.room().pages) == [True, True, False]
            assert store.batch_exists(pages.keys) == 2
            assert len(store.headers(pages.keys)) == 3
            assert sorted(store.scan()) == sorted(pages.keys[:2])
            assert store.usage()[0].pages == 2
            assert store.list_meta() == []
            if mode == "rw":
                store.put_meta("m-1", b"x")
                assert store.get_meta("m-1") == b"x"
                assert store.page_set(pages.keys, pages.sealed()) == [True] * 3
                header = pages.stored(0)[:128]
                assert store.delete(pages.keys[:2], [header, None]) == [True, True]
    finally:
        server.command("ACL", "DELUSER", "poor")


# -- connections -----------------------------------------------------------------------------------


def _squeezed(store, receive):
    """Makes the buffers of the connection that calls use small."""
    (link,) = store._store.servers.masters()
    with link.lend() as wire:
        wire._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        wire._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)


# Less than a segment of the loopback device (64 KiB), and TCP itself crawls.
@pytest.mark.parametrize(("unix", "receive"), [(False, 100_000), (True, 2048)])
def test_small_buffers_on_our_side_stop_nothing(server, unix, receive):
    pages = Pages(count=300, size=10_000, segments=2)
    with registry.open(server.unix_url if unix else server.url, raw=True) as store:
        _squeezed(store, receive)
        assert store.page_set(pages.keys, pages.sealed()) == [True] * 300
        assert store.batch_exists(pages.keys * 10) == 3000
        room = pages.room()
        assert store.page_get(pages.keys, room.pages) == [True] * 300
        assert not pages.wrong([True] * 300, room)


@pytest.mark.parametrize("segments", [1, 64, 3000])
@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("window", ["1", "100KB", "8MiB"])
def test_connections_windows_and_segments_change_no_byte(server, segments, connections, window):
    pages = Pages(count=20, size=30_000, segments=segments)
    with registry.open(f"{server.url}?connections={connections}&window={window}") as store:
        assert store.page_set(pages.keys, pages.sealed()) == [True] * 20
        asked = pages.keys[:7] + Pages(count=2, seed=9).keys + pages.keys[7:]
        room = Pages(count=22, size=30_000, segments=segments).room()
        assert store.page_get(asked, room.pages) == [True] * 7 + [False] * 2 + [True] * 13
        right = [room.payload(i) == pages.payloads[i] for i in range(7)]
        right += [room.payload(i + 2) == pages.payloads[i] for i in range(7, 20)]
        assert right == [True] * 20
        assert room.intact()


def test_a_forked_process_is_told_to_open_anew_and_harms_nothing(server):
    pages = Pages(count=4)
    with registry.open(server.url) as store:
        store.page_set(pages.keys, pages.sealed())
        child = os.fork()
        if not child:
            try:
                store.batch_exists(pages.keys)
            except BackendUnavailable as error:
                os._exit(7 if "forked" in str(error) else 8)
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert store.page_get(pages.keys, pages.room().pages) == [True] * 4


# -- what servers say ------------------------------------------------------------------------------


def test_errors_of_a_call_have_its_words_and_what_was_done():
    error = typed(Refused("LOADING the dataset"), "redis://h", [True, False])
    assert isinstance(error, BackendUnavailable)
    assert str(error) == "redis://h: LOADING the dataset"
    assert error.done == [True, False]
    for late in (TimeoutError("late"), BlockingIOError(11, "again")):
        assert isinstance(typed(late, "redis://h"), BackendTimeout)


@pytest.mark.parametrize("line", ["NOPERM no", "READONLY a replica", "MOVED 1 h:2", "ERR no"])
def test_what_we_ask_wrongly_is_a_mistake_of_the_configuration(line):
    error = at_open(Refused(line), "redis://h")
    assert isinstance(error, ConfigError)
    assert line in str(error)


@pytest.mark.parametrize("line", ["LOADING it", "MASTERDOWN x", "CLUSTERDOWN y", "OOM z"])
def test_what_passes_is_none(line):
    assert isinstance(at_open(Refused(line), "redis://h"), BackendUnavailable)


def test_details_that_are_kept_from_us_are_unknown(server):
    server.command("ACL", "SETUSER", "poor", "on", ">secret", "~l3:*", "+@all", "-config", "-info")
    try:
        with registry.open(f"redis://poor:secret@127.0.0.1:{server.port}", raw=True) as store:
            found = store.details()
    finally:
        server.command("ACL", "DELUSER", "poor")
    assert (found.pop("server"), found.pop("servers")) == ("redis unknown", 1)
    assert set(found.values()) == {"unknown"}


def test_details_and_usage_are_the_servers(server):
    pages = Pages(count=3, size=65_536)
    with registry.open(server.url) as store:
        store.page_set(pages.keys, pages.sealed())
        found = store.inner.inner.inner.inner.details()
        (usage,) = store.usage()
    assert found["server"].split()[0] in ("valkey", "redis")
    assert found["maxmemory-policy"] == "noeviction"
    assert found["memory used, bytes"] > 3 * 65_536
    assert (usage.place, usage.pages, usage.payload_bytes) == (PLACE, 3, 3 * 65_536)
    assert 3 * 65_664 < usage.stored_bytes < 3 * 65_664 * 1.3
