"""What others do to the store behind our back, and what a server does to it when it is full."""

from __future__ import annotations

import itertools
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING

import pytest

from l3store import registry
from l3store.errors import BackendUnavailable, CapacityError
from l3store.servers.process import HOST
from l3store.testing.faults import DOWN, failing, get, until_well, with_options
from l3store.testing.kit import Pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from l3store.abc import Backend
    from l3store.servers.redis import RedisServer

    NewRedis = Callable[..., RedisServer]

MIB = 1 << 20


@pytest.fixture
def pages() -> Pages:
    return Pages(count=6, size=10_000, segments=2)


@pytest.fixture
def store(redis_server: RedisServer, pages: Pages) -> Iterator[Backend]:
    """Ours, with the pages in it."""
    with registry.open(redis_server.url) as one:
        until_well(one, pages)
        yield one


def name_of(key: str) -> str:
    return f"l3:{key}"


def everything(server: RedisServer) -> dict[bytes, bytes]:
    """All keys with what stands in them, whatever it is."""
    with server.client() as client:
        return {key: client.dump(key) for key in client.scan_iter()}


# -- pages that were touched --------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda page, other: page[:-1],
        lambda page, other: page[:128],
        lambda page, other: page[:64],
        lambda page, other: b"",
        lambda page, other: page + b"x",
        lambda page, other: page + bytes(MIB),
        lambda page, other: other,
        lambda page, other: page[:128] + other[128:],
        lambda page, other: page[:5000] + bytes([page[5000] ^ 1]) + page[5001:],
        lambda page, other: random.Random(0).randbytes(len(page)),
    ],
    ids=["a byte less", "a header", "half a header", "nothing", "a byte more", "much more",
         "another page", "another page's payload", "a bit", "noise"],
)  # fmt: skip
def test_another_value_is_a_miss_and_heals(
    redis_server: RedisServer, store: Backend, pages: Pages, change: Callable[..., bytes]
) -> None:
    name = name_of(pages.keys[2])
    value = change(pages.stored(2), pages.stored(4))
    redis_server.command("SET", name, value)
    done, _ = get(store, pages)
    assert done == [True, True, False, True, True, True]
    assert redis_server.command("EXISTS", name) == 0
    assert store.batch_exists(pages.keys) == 2
    until_well(store, pages)


@pytest.mark.parametrize(
    "make",
    [("LPUSH", "a"), ("HSET", "a", "b"), ("SADD", "a"), ("ZADD", 1, "a"), ("XADD", "*", "a", "b")],
    ids=["list", "hash", "set", "sorted set", "stream"],
)
def test_a_value_of_another_type_is_a_miss_and_heals(
    redis_server: RedisServer, store: Backend, pages: Pages, make: tuple[str | int, ...]
) -> None:
    name = name_of(pages.keys[1])
    redis_server.command("DEL", name)
    redis_server.command(make[0], name, *make[1:])
    assert store.headers(pages.keys)[1] is None
    done, _ = get(store, pages)
    assert done == [True, False, True, True, True, True]
    until_well(store, pages)
    # And a set that meets it replaces it.
    redis_server.command("DEL", name)
    redis_server.command(make[0], name, *make[1:])
    assert store.page_set(pages.keys, pages.sealed()) == [True] * 6
    assert get(store, pages)[0] == [True] * 6


def test_a_page_that_goes_between_exists_and_get_is_a_miss(
    redis_server: RedisServer, store: Backend, pages: Pages
) -> None:
    assert store.batch_exists(pages.keys) == 6
    redis_server.command("DEL", name_of(pages.keys[0]), name_of(pages.keys[4]))
    done, _ = get(store, pages)
    assert done == [False, True, True, True, False, True]
    assert store.exists_each(pages.keys) == done


def test_a_store_that_was_emptied_serves_on(
    redis_server: RedisServer, store: Backend, pages: Pages
) -> None:
    redis_server.command("FLUSHALL")
    assert store.batch_exists(pages.keys) == 0
    assert get(store, pages)[0] == [False] * 6
    until_well(store, pages)
    with registry.open(f"{redis_server.url}?mode=ro") as other:  # as tools do
        assert get(other, pages)[0] == [True] * 6
    # A page of another length may have the place now.
    redis_server.command("FLUSHALL")
    until_well(store, Pages(count=2, size=777))


# -- what is not ours ---------------------------------------------------------------------------


def test_nothing_outside_the_prefix_and_nothing_foreign_inside_is_touched(
    redis_server: RedisServer, store: Backend, pages: Pages
) -> None:
    key = pages.keys[0]
    foreign = [
        "other", key, f"L3:{key}", f"xl3:{key}", "l3", "l3:", "l3:README", f"l3:{key}x",
        f"l3:{key[:-1]}", f"l3:{key.upper()}", "l3:a/b/c/d/e", "l3:../../etc/passwd",
        b"l3:\xff\xfe/kv/all/\x00", f"l3:{key}/{key}", f"l3:\n{key}", "l3:*", "l3:[a-z]*",
    ]  # fmt: skip
    for name in foreign:
        redis_server.command("SET", name, "not ours")
    redis_server.command("LPUSH", "l3:list", "not ours")
    before = everything(redis_server)
    assert sorted(store.scan()) == sorted(pages.keys)
    (used,) = store.usage()
    assert (used.pages, used.payload_bytes) == (6, 6 * 10_000)
    for place in ("other/kv/all", "conformance-0/kv/T1of2"):
        assert list(store.scan(place)) == []
    store.list_meta()
    store.health()
    store.details()
    get(store, pages)
    until_well(store, pages)
    assert store.delete(pages.keys) == [True] * 6
    after = everything(redis_server)
    ours = {name_of(key).encode() for key in pages.keys}
    assert {name: before[name] for name in before if name not in ours} == after


def test_small_objects_of_others_are_not_listed(redis_server: RedisServer, store: Backend) -> None:
    store.put_meta("model-0", b"ours")
    for name in (b"\xff", "a/b/c/d", "../x", "", "x y", "A" * 1000):
        redis_server.command("HSET", "l3:meta", name, "not ours")
    assert store.list_meta() == ["model-0"]
    assert store.get_meta("model-0") == b"ours"


@pytest.mark.parametrize(
    "damage",
    [
        ("SET", "l3:lengths", "no hash"),
        ("HSET", "l3:lengths", Pages(count=1).place, "no number"),
        ("HSET", "l3:lengths", Pages(count=1).place, "-5"),
    ],
    ids=["another type", "no number", "negative"],
)
def test_a_damaged_length_is_an_error_until_it_is_gone(
    redis_server: RedisServer, pages: Pages, damage: tuple[str, ...]
) -> None:
    redis_server.command(*damage)
    with registry.open(redis_server.url, raw=True) as store:
        with pytest.raises(BackendUnavailable):
            store.page_set(pages.keys, pages.sealed())
        with pytest.raises(BackendUnavailable):
            get(store, pages)
        assert store.batch_exists(pages.keys) == 0
        redis_server.command("DEL", "l3:lengths")
        until_well(store, pages)


def test_two_prefixes_are_two_stores(redis_server: RedisServer, pages: Pages) -> None:
    with (
        registry.open(f"{redis_server.url}?prefix=a:") as one,
        registry.open(f"{redis_server.url}?prefix=a:b:") as inside,
    ):
        until_well(inside, pages)
        assert list(one.scan()) == []
        assert one.batch_exists(pages.keys) == 0
        until_well(one, Pages(count=2, size=500))
        assert one.delete(pages.keys)[2:] == [False] * 4
        assert get(inside, pages)[0] == [True] * 6


def test_a_glob_in_the_prefix_matches_itself_alone(redis_server: RedisServer, pages: Pages) -> None:
    with (
        registry.open(f"{redis_server.url}?prefix=[a-z]*%3F\\:") as one,
        registry.open(f"{redis_server.url}?prefix=b1%3F:") as other,
    ):
        until_well(other, pages)
        assert list(one.scan()) == []
        until_well(one, pages)
        assert sorted(one.scan()) == sorted(pages.keys)


# -- full ----------------------------------------------------------------------------------------


def full_of(server: RedisServer, count: int) -> list[Pages]:
    """Chains of 8 pages of 128 KiB: so many as `count` MiB."""
    return [Pages(count=8, size=128 << 10, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_full_server_keeps_what_it_has_and_says_what_it_did_not_take(
    new_redis: NewRedis, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = new_redis(kind=kind, maxmemory=16 * MIB, policy="noeviction")
    with caplog.at_level(logging.WARNING), registry.open(f"{server.url}?window=128KiB") as store:
        assert "noeviction" in caplog.text
        chains, kept = full_of(server, 24), 0
        full = None
        for chain in chains:
            try:
                done = store.page_set(chain.keys, chain.sealed())
            except CapacityError as error:
                full, done = error, error.done
            kept += sum(done)
            assert store.exists_each(chain.keys) == done
        assert full is not None
        assert 40 < kept < 128
        for chain in chains:
            there = store.exists_each(chain.keys)
            assert get(store, chain)[0] == there
        server.command("FLUSHALL")
        until_well(store, chains[-1])


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
def test_a_server_that_evicts_takes_all_and_loses_whole_pages(
    new_redis: NewRedis, policy: str
) -> None:
    server = new_redis(maxmemory=16 * MIB, policy=policy)
    with registry.open(f"{server.url}?window=128KiB") as store:
        chains = full_of(server, 40)
        for chain in chains:
            assert any(store.page_set(chain.keys, chain.sealed()))
            get(store, chain)
        assert server.info("stats")["evicted_keys"] > 100
        found = 0
        for chain in chains:
            found += sum(get(store, chain)[0])
        assert 0 < found <= 128
        until_well(store, Pages(count=2, size=128 << 10, seed=999))


def test_a_page_over_the_servers_limit_is_a_mistake_of_the_caller(new_redis: NewRedis) -> None:
    server = new_redis(settings={"proto-max-bulk-len": "1mb"})
    with registry.open(server.url) as store:
        large = Pages(count=2, size=MIB)
        with pytest.raises(ValueError, match="proto-max-bulk-len"):
            store.page_set(large.keys, large.sealed())
        assert store.batch_exists(large.keys) == 0
        until_well(store, Pages(count=2, size=MIB - 128))


def test_a_limit_that_came_later_is_an_error_and_the_store_serves_on(
    new_redis: NewRedis,
) -> None:
    server = new_redis()
    with registry.open(server.url) as store:
        large = Pages(count=3, size=2 * MIB, place="conformance-0/kv/T1of2")
        until_well(store, large)
        server.command("CONFIG", "SET", "proto-max-bulk-len", "1mb")
        new = Pages(count=3, size=2 * MIB, seed=1, place="conformance-0/kv/T1of2")
        failing(lambda: store.page_set(new.keys, new.sealed()), within=5)
        assert get(store, large)[0] == [True] * 3  # what is there can be read
        until_well(store, Pages(count=2))


def test_an_output_limit_ends_a_read_with_an_error_and_a_smaller_window_reads(
    new_redis: NewRedis,
) -> None:
    server = new_redis(settings={"client-output-buffer-limit": "normal 2mb 2mb 1"})
    pages = Pages(count=24, size=MIB)
    with registry.open(server.url) as store:
        assert all(store.page_set(pages.keys, pages.sealed()))
    with registry.open(with_options(server.url, window="1MiB")) as store:
        assert get(store, pages)[0] == [True] * 24
    with registry.open(with_options(server.url, window="64MiB", connections=1)) as store:
        try:
            get(store, pages)
        except DOWN:
            until_well(store, Pages(count=1, size=MIB))


# -- what a server says now and then -------------------------------------------------------------


def test_connections_that_the_server_kills_are_errors_and_no_wrong_byte(
    redis_server: RedisServer,
) -> None:
    over, killed = Event(), 0
    pages = Pages(count=20, size=100_000)
    fresh = (Pages(count=4, size=100_000, seed=seed) for seed in itertools.count(1))

    def kill() -> None:
        with redis_server.client() as admin:
            while not over.wait(0.003):
                admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    with registry.open(redis_server.url, raw=True) as store, ThreadPoolExecutor(1) as pool:
        until_well(store, pages)
        killing = pool.submit(kill)
        try:
            for _ in range(20):
                new = next(fresh)
                try:
                    store.page_set(new.keys, new.sealed())
                    get(store, new)
                    assert all(get(store, pages)[0])
                except DOWN:
                    killed += 1
        finally:
            over.set()
        killing.result()
        assert killed > 0
        until_well(store, pages)


def test_a_paused_server_is_an_error_in_time(
    redis_server: RedisServer, store: Backend, pages: Pages
) -> None:
    redis_server.command("CLIENT", "PAUSE", 2000, "ALL")
    failing(lambda: get(store, pages), within=5)
    until_well(store, pages)


def test_a_server_that_loads_says_so_and_has_all_pages_afterwards(
    new_redis: NewRedis, pages: Pages
) -> None:
    server = new_redis(
        settings={"enable-debug-command": "yes", "key-load-delay": 8_000,
                  "loading-process-events-interval-bytes": 1024}
    )  # fmt: skip
    more = Pages(count=60, size=10_000, seed=5)
    with registry.open(server.url) as store:
        until_well(store, pages)
        until_well(store, more)
        with server.client() as loader:
            connection = loader.connection_pool.get_connection()
            connection.send_command("DEBUG", "RELOAD")
            seen = []
            while not connection.can_read(timeout=0):
                try:
                    get(store, pages)
                except DOWN as error:
                    seen.append(str(error))
            assert connection.read_response() == b"OK"
            loader.connection_pool.release(connection)
        assert any("LOADING" in text for text in seen)
        until_well(store, pages)
        assert get(store, more)[0] == [True] * 60


def test_a_master_that_became_a_replica_refuses_writes_until_it_is_one_again(
    redis_server: RedisServer, new_redis: NewRedis, store: Backend, pages: Pages
) -> None:
    master = new_redis()
    with registry.open(master.url) as other:
        until_well(other, pages)
    redis_server.command("REPLICAOF", HOST, master.port)
    new = Pages(count=2, size=10_000, seed=1)
    error = failing(lambda: store.page_set(new.keys, new.sealed()), within=5)
    assert isinstance(error, BackendUnavailable)
    assert "READONLY" in str(error)
    redis_server.command("REPLICAOF", "NO", "ONE")
    until_well(store, new)


def test_no_connection_left_is_an_error_until_there_is_one(new_redis: NewRedis) -> None:
    server = new_redis(settings={"maxclients": 4})
    pages = Pages(count=2)
    with registry.open(server.url) as store, server.client() as admin:
        until_well(store, pages)
        admin.ping()
        takers = [server.client() for _ in range(4)]
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for taker in takers[:3]:
            taker.ping()
        assert "max number of clients" in str(failing(lambda: get(store, pages), within=5))
        for taker in takers:
            taker.close()
        until_well(store, pages)
