"""A cluster whose slots move and whose nodes fail, and a master that is replaced."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from threading import Event, Thread
from time import sleep
from typing import TYPE_CHECKING

import pytest
from redis.crc import key_slot

from l3store import registry
from l3store.errors import BackendUnavailable, ConfigError
from l3store.servers.process import HOST, wait_until
from l3store.testing.faults import DOWN, failing, get, until_well, with_options
from l3store.testing.kit import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from l3store.abc import Backend
    from l3store.servers.redis import RedisServer
    from l3store.servers.redis_groups import RedisCluster, RedisSentinel

LONGEST = 6.0  # the deadline of a call, and what a busy machine adds


@pytest.fixture
def cluster(redis_cluster: RedisCluster) -> Iterator[RedisCluster]:
    """An empty and healthy one."""
    yield redis_cluster
    for node in redis_cluster.nodes:
        if not node.running:
            node.restart()
    redis_cluster.wait_until_well()
    for node in redis_cluster.nodes:
        node.command("FLUSHALL")


@pytest.fixture
def pages() -> Pages:
    """Enough for all nodes."""
    return Pages(count=30, size=10_000, segments=2)


@pytest.fixture(params=["bare", "wrapped"])
def store(cluster: RedisCluster, request: pytest.FixtureRequest, pages: Pages) -> Iterator[Backend]:
    with registry.open(f"{cluster.url}?cluster=yes", raw=request.param == "bare") as one:
        until_well(one, pages)
        yield one


def node_of(cluster: RedisCluster, pages: Pages, i: int) -> RedisServer:
    return cluster.node_of(slot_of(pages, i))


def slot_of(pages: Pages, i: int) -> int:
    slot: int = key_slot(f"l3:{pages.keys[i]}".encode())
    return slot


def test_pages_lie_on_all_nodes_and_are_listed_once(
    cluster: RedisCluster, store: Backend, pages: Pages
) -> None:
    assert all(node.command("DBSIZE") > 0 for node in cluster.nodes)
    assert sorted(store.scan()) == sorted(pages.keys)
    assert store.batch_exists(pages.keys) == 30
    assert store.usage()[0].pages == 30
    assert store.delete(pages.keys[10:]) == [True] * 20
    assert store.exists_each(pages.keys) == [True] * 10 + [False] * 20


def test_the_largest_page_is_what_every_node_takes(cluster: RedisCluster) -> None:
    few = cluster.nodes[1]
    few.command("CONFIG", "SET", "proto-max-bulk-len", 2 << 20)
    try:
        with registry.open(f"{cluster.url}?cluster=yes") as store:
            assert store.capabilities.max_page_bytes == 2 << 20
    finally:
        few.command("CONFIG", "SET", "proto-max-bulk-len", 512 << 20)


def test_a_cluster_that_is_not_named_as_one_is_told(cluster: RedisCluster) -> None:
    with pytest.raises(ConfigError, match="cluster"):
        registry.open(cluster.nodes[0].url)


def test_a_server_alone_that_is_called_a_cluster_is_told(redis_server: RedisServer) -> None:
    with pytest.raises((ConfigError, BackendUnavailable), match="luster"):
        registry.open(f"{redis_server.url}?cluster=yes")


def test_a_dead_node_is_an_error_in_time_and_the_others_serve(
    cluster: RedisCluster, pages: Pages
) -> None:
    url = f"{cluster.url}?cluster=yes"
    with registry.open(url) as store, registry.open(url, raw=True) as bare:
        until_well(store, pages)
        dead = cluster.nodes[2]
        dead.kill()
        elsewhere = [i for i in range(30) if node_of(cluster, pages, i) is not dead]
        for one in (store, bare, bare):
            error = failing(partial(get, one, pages), within=LONGEST)
            assert [i for i, good in enumerate(error.done) if good] == elsewhere
        cluster.restart(dead)
        until_well(store, pages)
        until_well(bare, pages)


def test_a_frozen_node_is_an_error_in_time_and_nothing_comes_late(
    cluster: RedisCluster, store: Backend, pages: Pages
) -> None:
    frozen = node_of(cluster, pages, 0)
    room = pages.room()
    frozen.freeze()
    try:
        failing(lambda: store.page_get(pages.keys, room.pages), within=LONGEST)
        room.reuse()
    finally:
        frozen.thaw()
    until_well(store, pages)
    assert room.untouched()


def test_looking_for_who_has_what_does_not_outlast_the_deadline_of_a_call(
    cluster: RedisCluster, pages: Pages
) -> None:
    """Nodes that take a connection and say nothing are asked one after another."""
    patient = "timeout=20s&connect_timeout=20s&deadline=500ms&breaker_failures=100"
    with registry.open(f"{cluster.url}?cluster=yes&{patient}") as store:
        until_well(store, pages)
        for node in cluster.nodes:
            node.freeze()
        try:
            for _ in range(4):
                failing(lambda: store.exists_each(pages.keys), within=LONGEST)
                sleep(0.5)  # a second after a look there is another one
        finally:
            for node in cluster.nodes:
                node.thaw()
        until_well(store, pages)


def move(cluster: RedisCluster, slot: int, source: RedisServer, target: RedisServer) -> None:
    """Gives a slot with all that is in it to another node, as cluster tools do."""
    begin_move(cluster, slot, source, target)
    move_keys(slot, source, target)
    end_move(cluster, slot, target)


def begin_move(cluster: RedisCluster, slot: int, source: RedisServer, target: RedisServer) -> None:
    target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.node_id(source))
    source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.node_id(target))


def move_keys(slot: int, source: RedisServer, target: RedisServer) -> None:
    while keys := source.command("CLUSTER", "GETKEYSINSLOT", slot, 100):
        source.command("MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", *keys)


def end_move(cluster: RedisCluster, slot: int, target: RedisServer) -> None:
    for node in cluster.nodes:
        node.command("CLUSTER", "SETSLOT", slot, "NODE", cluster.node_id(target))


def test_slots_that_move_are_followed(cluster: RedisCluster, store: Backend, pages: Pages) -> None:
    moved = {slot_of(pages, i) for i in range(0, 30, 6)}
    homes = {slot: cluster.node_of(slot) for slot in moved}
    try:
        for slot, home in homes.items():
            target = next(node for node in cluster.nodes if node is not home)
            begin_move(cluster, slot, home, target)
            assert get(store, pages)[0] == [True] * 30
            move_keys(slot, home, target)
            assert store.exists_each(pages.keys) == [True] * 30  # by an ASK
            assert get(store, pages)[0] == [True] * 30
            end_move(cluster, slot, target)
            assert get(store, pages)[0] == [True] * 30  # by a MOVED
            assert store.batch_exists(pages.keys) == 30
        until_well(store, Pages(count=30, size=10_000, seed=1))
    finally:
        for slot, home in homes.items():
            now = next(node for node in cluster.nodes if node is not home)
            move(cluster, slot, now, home)


def test_slots_that_move_while_threads_work_give_no_wrong_byte(
    cluster: RedisCluster, pages: Pages
) -> None:
    over, wrong = Event(), []

    def work() -> None:
        try:
            while not over.is_set():
                with suppress(*DOWN):
                    get(store, pages)
                    store.page_set(pages.keys, pages.sealed())
        except BaseException as error:
            wrong.append(error)

    with registry.open(f"{cluster.url}?cluster=yes") as store:
        until_well(store, pages)
        threads = [Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for i in range(4):
                slot = slot_of(pages, i)
                home = cluster.node_of(slot)
                target = next(node for node in cluster.nodes if node is not home)
                move(cluster, slot, home, target)
                move(cluster, slot, target, home)
        finally:
            over.set()
            for thread in threads:
                thread.join(30)
        assert wrong == []
        until_well(store, pages)


def test_a_sentinel_leads_to_the_new_master(redis_sentinel: RedisSentinel, pages: Pages) -> None:
    group = redis_sentinel
    url = f"redis://{HOST}:{group.sentinel.port}?sentinel={group.name}"
    with registry.open(with_options(url, breaker_max_cooldown="500ms")) as store:
        until_well(store, pages)
        group.master.command("WAIT", 1, 5000)
        group.master.kill()
        failing(lambda: get(store, pages), within=LONGEST)
        group.wait_for_failover()
        until_well(store, pages)
        assert group.replica.command("DBSIZE") >= 30
        with registry.open(url) as other:
            assert get(other, pages)[0] == [True] * 30


def test_a_master_that_hands_over_is_left(redis_sentinel: RedisSentinel, pages: Pages) -> None:
    """The old master lives on as a replica, and its connections stay open."""
    group = redis_sentinel
    at = f"{HOST}:{group.sentinel.port}"
    with pytest.raises((ConfigError, BackendUnavailable), match="nobody"):
        registry.open(f"redis://{at}?sentinel=nobody")
    with pytest.raises(ConfigError, match=r"unknown command.* Add sentinel="):
        registry.open(f"redis://{at}")
    url = f"redis://{at}?sentinel={group.name}"
    with registry.open(with_options(url, breaker_max_cooldown="500ms")) as store:
        until_well(store, pages)
        group.sentinel.command("SENTINEL", "FAILOVER", group.name)
        group.wait_for_failover()
        group.master.command("REPLICAOF", HOST, group.replica.port)  # or in ten seconds
        new = Pages(count=30, size=10_000, seed=1)
        until_well(store, new)
        assert group.replica.command("EXISTS", f"l3:{new.keys[0]}") == 1


def test_a_sentinel_that_says_nothing_is_not_waited_for_and_none_stays_connected(
    redis_sentinel: RedisSentinel, pages: Pages
) -> None:
    group = redis_sentinel
    url = f"redis://{HOST}:{group.sentinel.port}?sentinel={group.name}"
    patient = "timeout=20s&connect_timeout=20s&deadline=500ms&breaker_failures=100"
    with registry.open(f"{url}&{patient}") as store:
        until_well(store, pages)
        group.sentinel.freeze()
        try:
            for _ in range(2):
                group.master.command("CLIENT", "KILL", "TYPE", "normal")
                failing(lambda: store.exists_each(pages.keys), within=LONGEST)
        finally:
            group.sentinel.thaw()
        until_well(store, pages)
    before = group.sentinel.info("clients")["connected_clients"]
    kept = []  # nor is it the collector of garbage that closes them
    for _ in range(5):
        kept.append(registry.open(url))
        kept[-1].close()
    wait_until(
        lambda: group.sentinel.info("clients")["connected_clients"] <= before,
        "the connections have been closed", seconds=10.0,
    )  # fmt: skip
