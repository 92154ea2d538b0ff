"""The servers of Redis's tests: what their options do, and that none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from l3store.errors import BackendUnavailable, ConfigError
from l3store.servers import redis as servers
from l3store.servers.certificates import Certificates
from l3store.servers.process import HOST, wait_until
from l3store.servers.redis import RedisServer
from l3store.servers.redis_groups import RedisCluster, RedisSentinel

if TYPE_CHECKING:
    from collections.abc import Iterator

QUICK = 3.0  # seconds that a start may take


@pytest.fixture(autouse=True)
def installed() -> None:
    try:
        servers.valkey_program()
        servers.redis_program()
    except ConfigError as error:
        if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as one:
        yield one


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_serves_within_three_seconds_and_ends(kind: str) -> None:
    start = time.monotonic()
    with RedisServer(kind=kind) as one:
        assert time.monotonic() - start < QUICK
        assert one.command("PING") is True
        assert one.url == f"redis://127.0.0.1:{one.port}"
        folder, pid = one.folder, one.process.pid
        assert folder.stat().st_mode & 0o077 == 0
    assert gone(pid)
    assert not folder.exists()


def test_listens_on_this_machine_alone(server: RedisServer) -> None:
    with server.client() as client:
        assert client.config_get("bind") == {"bind": HOST}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}


def test_serves_on_a_unix_socket(server: RedisServer) -> None:
    server.command("SET", "a", "b")
    with redis.Redis.from_url(server.unix_url) as client:
        assert client.get("a") == b"b"


def test_a_restart_is_empty_and_on_the_same_port(server: RedisServer) -> None:
    port, pid = server.port, server.process.pid
    server.command("SET", "a", "b")
    server.restart()
    assert server.port == port
    assert gone(pid)
    assert server.command("GET", "a") is None


def test_a_killed_one_refuses_and_comes_back(server: RedisServer) -> None:
    server.kill()
    assert not server.running
    with pytest.raises(redis.ConnectionError):
        server.command("PING")
    server.restart()
    assert server.command("PING") is True


def test_a_frozen_one_answers_after_thawing(server: RedisServer) -> None:
    server.freeze()
    with server.client(socket_timeout=0.1) as client, pytest.raises(redis.TimeoutError):
        client.ping()
    server.thaw()
    assert server.command("PING") is True


def test_a_frozen_one_can_be_stopped() -> None:
    with RedisServer() as one:
        one.freeze()
    assert gone(one.process.pid)


@pytest.mark.parametrize("users", [(), ("reader on >other ~l3* +@read",)])
def test_asks_for_the_password(users: tuple[str, ...]) -> None:
    with RedisServer(password='p @"\\ word', users=users) as one:
        assert one.command("PING") is True
        with redis.Redis.from_url(one.url) as client:
            assert client.ping()
        for word in (None, "another"):
            with one.client(password=word) as client, pytest.raises(redis.AuthenticationError):
                client.ping()


def test_knows_the_users_it_is_given() -> None:
    with RedisServer(users=["reader on >secret ~l3* +@read"]) as one:
        one.command("SET", "l3:a", "b")
        with one.client(username="reader", password="secret") as client:
            assert client.get("l3:a") == b"b"
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.get("other")
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.set("l3:a", "c")


def test_holds_what_it_is_told() -> None:
    with RedisServer(maxmemory=10 << 20, policy="noeviction") as one:
        stored = 0
        for i in range(20):
            with suppress(redis.exceptions.OutOfMemoryError):
                stored += one.command("SET", i, bytes(1 << 20)) is True
        assert 5 <= stored <= 10
        assert one.info("memory")["maxmemory"] == 10 << 20


def test_speaks_tls_with_the_certificate(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)
    with RedisServer(tls=made, password="secret") as one:
        assert one.url == f"rediss://:secret@127.0.0.1:{one.port}"
        assert one.command("PING") is True
        wrong = ssl.create_default_context(cafile=str(made.wrong_ca))
        with (
            socket.create_connection((HOST, one.port)) as plain,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            wrong.wrap_socket(plain, server_hostname=HOST)


def test_further_settings_reach_the_server() -> None:
    with (
        RedisServer(settings={"maxclients": 17, "proto-max-bulk-len": "1mb"}) as one,
        one.client() as client,
    ):
        assert client.config_get("maxclients") == {"maxclients": "17"}


def test_a_setting_that_is_none_is_told() -> None:
    with pytest.raises(ConfigError, match="maxmemmory"):
        RedisServer(settings={"maxmemmory": 1})


def test_a_taken_port_is_told_and_another_one_found() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BackendUnavailable, match=f"port {port} .* taken"):
            RedisServer(port=port)


def test_a_port_that_was_taken_meanwhile_is_left_to_the_other(
    monkeypatch: pytest.MonkeyPatch, server: RedisServer
) -> None:
    free = servers.free_ports
    offered = iter([[server.port, 1]])
    monkeypatch.setattr(servers, "free_ports", lambda count: next(offered, None) or free(count))
    with RedisServer() as other:
        assert other.port != server.port
        other.command("SET", "a", "b")
    assert server.command("GET", "a") is None


def test_a_folder_of_ones_own_stays(tmp_path: Path) -> None:
    with RedisServer(tmp_path):
        assert (tmp_path / "redis.conf").stat().st_mode & 0o077 == 0
    assert (tmp_path / "server.log").exists()


def test_a_folder_whose_path_is_too_long_has_no_unix_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with RedisServer(deep) as one:
        assert one.command("PING") is True
        with pytest.raises(ConfigError, match="too long"):
            one.unix_url  # noqa: B018 - reading it raises


def test_ends_with_the_process_that_started_it() -> None:
    code = (
        "import time\n"
        "from l3store.servers.redis import RedisServer\n"
        "print(RedisServer().process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        pid = int(one.stdout.readline())
        assert not gone(pid)
        one.send_signal(signal.SIGKILL)
    wait_until(lambda: gone(pid), "the server has ended")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"pip install 'l3store\[servers\]'"):
        RedisServer()
    with pytest.raises(ConfigError, match="apt install redis-server"):
        RedisServer(kind="redis")


def test_a_cluster_serves_within_three_seconds_on_each_node() -> None:
    start = time.monotonic()
    with RedisCluster(password="secret") as cluster:
        assert time.monotonic() - start < QUICK
        owners = set()
        for i in range(50):
            node = cluster.node_of(cluster.nodes[0].command("CLUSTER", "KEYSLOT", f"k{i}"))
            node.command("SET", f"k{i}", i)  # a wrong node would answer MOVED
            owners.add(node.port)
            if node is cluster.nodes[0]:
                kept = f"k{i}"
        assert len(owners) == 3
        dead = cluster.nodes[2]
        cluster.restart(dead)
        assert dead.info("keyspace") == {}
        assert cluster.nodes[0].command("EXISTS", kept)
    assert all(gone(node.process.pid) for node in cluster.nodes)


def test_a_sentinel_makes_the_replica_the_master() -> None:
    start = time.monotonic()
    with RedisSentinel(password="secret", down_after=0.3) as group:
        assert time.monotonic() - start < QUICK
        assert group.master_port() == group.master.port
        group.master.command("SET", "a", "b")
        group.master.command("WAIT", 1, 5000)
        group.master.kill()
        group.wait_for_failover()
        assert group.replica.command("GET", "a") == b"b"
        group.replica.command("SET", "a", "c")
