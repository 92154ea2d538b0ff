"""What is wrong at the start is told at the start, by the server's own words, and soon."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from l3store import registry
from l3store.errors import BackendUnavailable, ConfigError, L3Error
from l3store.servers.process import HOST
from l3store.testing.faults import until_well
from l3store.testing.kit import Pages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from l3store.servers.certificates import Certificates
    from l3store.servers.redis import RedisServer

    NewRedis = Callable[..., RedisServer]

SOON = 4.0  # redis-py by itself tries again for longer than that


def told(url: str, kind: type[L3Error] = ConfigError) -> str:
    """Returns what the error of opening says; it comes soon, and with no word of a password."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        registry.open(url)
    assert time.monotonic() - start < SOON
    assert "wrong-secret" not in str(caught.value)
    return str(caught.value)


def serves(url: str) -> bool:
    with registry.open(url) as store:
        until_well(store, Pages(count=2))
    return True


def test_a_wrong_or_missing_password(new_redis: NewRedis) -> None:
    server = new_redis(password="secret")
    at = f"{HOST}:{server.port}"
    assert "WRONGPASS" in told(f"redis://:wrong-secret@{at}")
    assert "NOAUTH" in told(f"redis://{at}")
    assert serves(server.url)
    assert serves(f"redis://{at}?password=secret")


def test_a_password_for_a_server_that_wants_none(redis_server: RedisServer) -> None:
    said = told(f"redis://:wrong-secret@{HOST}:{redis_server.port}")
    assert "password" in said.lower()


def test_users_of_an_access_list(new_redis: NewRedis) -> None:
    server = new_redis(
        users=[
            "writer on >secret ~l3:* +@all -@dangerous",
            "elsewhere on >secret ~other:* +@all",
            "reader on >secret ~l3:* +@read +@connection",
        ]
    )
    at = f"{HOST}:{server.port}"
    assert "WRONGPASS" in told(f"redis://writer:wrong-secret@{at}")
    assert "WRONGPASS" in told(f"redis://nobody:secret@{at}")
    assert "NOPERM" in told(f"redis://elsewhere:secret@{at}")
    assert "NOPERM" in told(f"redis://reader:secret@{at}")
    assert serves(f"redis://writer:secret@{at}")
    assert serves(f"redis://elsewhere:secret@{at}?prefix=other:")
    with registry.open(f"redis://reader:secret@{at}?mode=ro") as store:
        pages = Pages(count=2)
        assert store.batch_exists(pages.keys) == 2
        room = pages.room()
        assert store.page_get(pages.keys, room.pages) == [True] * 2


def test_what_a_server_is_not_is_told(new_redis: NewRedis) -> None:
    at = f"{HOST}:{new_redis().port}"
    assert "it is no sentinel, leave out sentinel=" in told(f"redis://{at}?sentinel=m")
    assert "it is no cluster, leave out cluster=yes" in told(f"redis://{at}?cluster=yes")


def test_a_right_that_is_taken_away_later_is_an_error_until_it_is_back(
    new_redis: NewRedis,
) -> None:
    server = new_redis(users=["writer on >secret ~l3:* +@all"])
    pages = Pages(count=2)
    with registry.open(f"redis://writer:secret@{HOST}:{server.port}") as store:
        until_well(store, pages)
        server.command("ACL", "SETUSER", "writer", "-get", "-set")
        room = pages.room()
        with pytest.raises(BackendUnavailable, match="NOPERM"):
            store.page_get(pages.keys, room.pages)
        new = Pages(count=2, seed=1)
        with pytest.raises(BackendUnavailable, match="NOPERM"):
            store.page_set(new.keys, new.sealed())
        server.command("ACL", "SETUSER", "writer", "+@all")
        until_well(store, pages)
        server.command("ACL", "DELUSER", "writer")  # it also closes his connections
        with pytest.raises(BackendUnavailable):
            store.batch_exists(pages.keys)
        server.command("ACL", "SETUSER", "writer", "on", ">secret", "~l3:*", "+@all")
        until_well(store, pages)


def test_a_database_that_is_none(redis_server: RedisServer) -> None:
    assert "out of range" in told(f"{redis_server.url}/99")
    assert "number" in told(f"{redis_server.url}/first")
    assert serves(f"{redis_server.url}/3")
    assert redis_server.info("keyspace").keys() == {"db3"}


def test_nobody_at_the_address(redis_server: RedisServer, tmp_path: Path) -> None:
    url = redis_server.url
    redis_server.stop()
    assert str(redis_server.port) in told(url, BackendUnavailable)
    assert "nobody" in told(f"unix://{tmp_path}/nobody", BackendUnavailable)
    assert "l3store.invalid" in told("redis://l3store.invalid", BackendUnavailable)


def test_tls_is_told_apart(
    new_redis: NewRedis, certificates: Certificates, redis_server: RedisServer
) -> None:
    server = new_redis(tls=certificates)
    at = f"{HOST}:{server.port}"
    assert serves(f"rediss://{at}?tls_ca={certificates.ca}")
    assert "TLS" in told(f"rediss://{at}?tls_ca={certificates.wrong_ca}")
    assert "TLS" in told(f"rediss://{at}")  # the system's certificates have not signed it
    plain = f"{HOST}:{redis_server.port}"  # it waits for the end of what it takes for a request
    assert "TLS" in told(f"rediss://{plain}?tls_ca={certificates.ca}", L3Error)
    told(f"redis://{at}", BackendUnavailable)  # it hangs up, and says no word that we can read


def test_a_client_without_a_certificate_where_one_is_asked_for(
    new_redis: NewRedis, certificates: Certificates
) -> None:
    server = new_redis(tls=certificates)
    server.command("CONFIG", "SET", "tls-auth-clients", "yes")
    url = f"rediss://{HOST}:{server.port}?tls_ca={certificates.ca}"
    told(url, L3Error)
    assert serves(f"{url}&tls_cert={certificates.certificate}&tls_key={certificates.key}")


def test_too_many_clients_is_no_fault_of_the_configuration(new_redis: NewRedis) -> None:
    server = new_redis(settings={"maxclients": 3})
    with server.client() as one, server.client() as two, server.client() as three:
        for client in (one, two, three):
            client.ping()
        assert "max number of clients" in told(server.url, BackendUnavailable)
    assert serves(server.url)


def test_a_store_of_another_format_or_kind_is_refused(redis_server: RedisServer) -> None:
    assert serves(redis_server.url)
    redis_server.command("SET", "l3:store", '{"format":99,"kind":"redis"}')
    said = told(redis_server.url)
    assert "99" in said
    assert "prefix" in said
    for other in ('{"format":1,"kind":"file"}', "", "not JSON", "[1]"):
        redis_server.command("SET", "l3:store", other)
        assert "prefix" in told(redis_server.url)
    redis_server.command("DEL", "l3:store")
    redis_server.command("LPUSH", "l3:store", "a list")
    assert "l3:store" in told(redis_server.url)
    assert serves(f"{redis_server.url}?prefix=another:")


def test_looking_makes_nothing(redis_server: RedisServer) -> None:
    assert "is no store" in told(f"{redis_server.url}?mode=ro")
    assert redis_server.command("DBSIZE") == 0


def test_a_replica_takes_no_store_and_says_why(
    new_redis: NewRedis, redis_server: RedisServer
) -> None:
    replica = new_redis(settings={"replicaof": f"{HOST} {redis_server.port}"})
    assert "READONLY" in told(replica.url, L3Error)
