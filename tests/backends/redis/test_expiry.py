"""A time to live that shrinks with depth, and a server that evicts by it."""

from __future__ import annotations

import pytest

from l3store import page, registry
from l3store.keys import Chain
from l3store.testing.kit import PLACE, Pages

TTL = 1000


def lives(server, keys):
    with server.client() as client:
        return [client.pttl(f"l3:{key}") / 1000 for key in keys]


@pytest.fixture
def store(server):
    with registry.open(f"{server.url}?ttl={TTL}s") as store:
        yield store


def expected(depth):
    return TTL * 4096 / (4096 + depth)


def near(found, depths):
    """At most a minute less than it should be; they are told in whole milliseconds."""
    return [-60 < life - expected(d) < 0.001 for life, d in zip(found, depths, strict=True)]


def test_the_deeper_the_shorter(server, store):
    pages = Pages(count=9000, size=64)
    store.page_set(pages.keys, pages.sealed())
    found = lives(server, pages.keys[::500])
    assert near(found, range(0, 9000, 500)) == [True] * 18
    assert found == sorted(found, reverse=True)
    assert 480 < found[8] < 520  # page 4000: about half


def test_a_page_of_unknown_depth_lives_as_the_first_one(server, store):
    pages = Pages(count=3)
    chain = Chain(pages.chain.hashes, None, None)
    sealed = page.seal(PLACE, chain, [[memoryview(data)] for data in pages.payloads])
    store.page_set(pages.keys, sealed)
    assert near(lives(server, pages.keys), [0, 0, 0]) == [True] * 3


def test_reading_and_setting_again_begin_it_anew(server, store):
    pages = Pages(count=3)
    store.page_set(pages.keys, pages.sealed())
    with server.client() as client:
        for key in pages.keys:
            client.expire(f"l3:{key}", 100)
    store.exists_each(pages.keys)
    assert max(lives(server, pages.keys)) <= 100, "asking is no reading"
    store.page_get(pages.keys[:1], pages.room().pages[:1])
    store.page_set(pages.keys[1:2], pages.sealed()[1:2])
    found = lives(server, pages.keys)
    assert near(found[:2], [0, 1]) == [True, True]
    assert found[2] <= 100


def test_who_only_looks_changes_no_life(server, store):
    pages = Pages(count=2)
    store.page_set(pages.keys, pages.sealed())
    with server.client() as client:
        client.expire(f"l3:{pages.keys[0]}", 100)
    with registry.open(f"{server.url}?ttl={TTL}s&mode=ro") as looking:
        assert looking.page_get(pages.keys, pages.room().pages) == [True, True]
    assert lives(server, pages.keys)[0] <= 100


def test_without_the_option_pages_live_for_ever(server):
    pages = Pages(count=2)
    with registry.open(server.url) as store:
        store.page_set(pages.keys, pages.sealed())
        store.page_get(pages.keys, pages.room().pages)
    with server.client() as client:
        assert [client.ttl(f"l3:{key}") for key in pages.keys] == [-1, -1]


def test_what_is_no_page_never_expires(server, store):
    pages = Pages(count=2)
    store.page_set(pages.keys, pages.sealed())
    store.put_meta("m-1", b"x")
    with server.client() as client:
        assert [client.ttl(f"l3:{name}") for name in ("store", "meta", "lengths")] == [-1] * 3


def test_a_server_that_evicts_by_it_drops_ends_of_chains_and_what_was_read_long_ago(server):
    """Twice what fits; of the chains that are read again, beginnings stay."""
    chains = [Pages(count=16, size=40_000, seed=seed) for seed in range(12)]
    with registry.open(f"{server.url}?ttl=1h&window=64KiB") as store:
        used = server.info("memory")["used_memory"]
        server.command("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
        server.command("CONFIG", "SET", "maxmemory-samples", 10)
        server.command("CONFIG", "SET", "maxmemory", used + 96 * 41_000)
        try:
            for pages in chains:
                store.page_set(pages.keys, pages.sealed())
            runs = [store.batch_exists(pages.keys) for pages in chains]
            each = [sum(store.exists_each(pages.keys)) for pages in chains]
        finally:
            server.command("CONFIG", "SET", "maxmemory", 0)
            server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
            server.command("CONFIG", "SET", "maxmemory-samples", 5)
    assert sum(each) < 110, "nothing was evicted"
    assert sum(runs) >= 0.8 * sum(each), f"usable {runs} of {each}"
