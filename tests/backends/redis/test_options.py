"""Options and addresses: what is wrong is named, with what would be right."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from l3store import registry
from l3store.backends.redis import RedisOptions
from l3store.config import load_options
from l3store.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h?conections=2", "did you mean 'connections'"),
        ("redis://h?connections=0", "'connections' must be positive"),
        ("redis://h?window=0", "'window' must be positive"),
        ("redis://h?timeout=0", "'timeout' must be positive"),
        ("redis://h?connect_timeout=0s", "'connect_timeout' must be positive"),
        ("redis://h?db=-1", "'db' is a number from 0"),
        ("redis://h?prefix=", "'prefix' has 1 to 128 printable"),
        ("redis://h?prefix=a%0Ab", "'prefix' has 1 to 128 printable"),
        (f"redis://h?prefix={'x' * 129}", "'prefix' has 1 to 128 printable"),
        ("redis://h?mode=rx", "did you mean 'r"),
        ("redis://h?cluster=yes&sentinel=m", "exclude each other"),
        ("redis://h/1?cluster=yes", "one database only"),
        ("redis://h?cluster=yes&db=2", "one database only"),
        ("redis://h/one", "such as /0"),
        ("redis://h/%C2%B2", "such as /0"),
        ("redis://h/\u00b2", "such as /0"),
        ("redis://h?ttl=99999999999999h", "'ttl' is at most 876000h"),
        ("redis://h?timeout=99999999999999h", "'timeout' is at most 876000h"),
        ("redis://h?connect_timeout=99999999999999h", "'connect_timeout' is at most 876000h"),
        ("redis://h?tls_ca=/etc/passwd", "option 'tls_ca' is for rediss://"),
        ("unix:///run/s?tls_ca=/etc/passwd", "option 'tls_ca' is for rediss://"),
        ("rediss://h?tls_ca=/no/such", "'tls_ca': there is no file '/no/such'"),
        ("rediss://h?tls_cert=/no/such&tls_key=/no/such", "'tls_cert': there is no file"),
        ("rediss://h?tls_ca=/no/such&cluster=yes", "'tls_ca': there is no file '/no/such'"),
        ("rediss://h?tls_ca=/no/such&sentinel=m", "'tls_ca': there is no file '/no/such'"),
        ("redis://h/1?db=2", "names another database"),
        ("redis://h?nodes=a:1", "add cluster=yes or sentinel"),
        ("redis://h?cluster=yes&nodes=a:b", "'a:b' is no address, such as 'host:6379'"),
        ("redis://h?cluster=yes&nodes=a:70000", "'a:70000' is no address"),
        ("redis://h?cluster=yes&nodes=a:0", "'a:0' is no address"),
        ("redis://h?cluster=yes&nodes=a:\u00b2", "is no address"),
        ("redis://h?sentinel=m&nodes=:5", "':5' is no address, such as 'host:26379'"),
        ("redis://", "names no host, such as redis://127.0.0.1:6379"),
        ("rediss://?sentinel=m", "such as rediss://127.0.0.1:26379"),
        ("rediss://h?tls_cert=c", "add 'tls_key'"),
        ("rediss://h?tls_key=c", "add 'tls_cert'"),
        ("unix://", "such as unix:///run/valkey.sock"),
        ("unix://host/run/s", "such as unix:///run/valkey.sock"),
        ("unix:///run/s?cluster=yes", "are for redis:// and rediss://"),
        ("unix:///run/s?sentinel=m", "are for redis:// and rediss://"),
    ],
)
def test_a_mistake_is_named(url, says):
    with pytest.raises(ConfigError) as caught:
        registry.open(url)
    assert says in str(caught.value)


def test_options_that_are_missing_in_the_url_come_from_elsewhere(server, monkeypatch):
    monkeypatch.setenv("L3STORE_REDIS_PREFIX", "mine:")
    monkeypatch.setenv("L3STORE_REDIS_DB", "2")
    with registry.open(server.unix_url) as store:
        store.put_meta("m-1", b"x")
    assert server.info("keyspace").keys() == {"db2"}
    with server.client(db=2) as client:
        assert sorted(client.keys()) == [b"mine:meta", b"mine:store"]


@pytest.mark.parametrize("number", ["", "/", "/0", "/3"])
def test_the_path_is_a_database(server, number):
    with registry.open(f"{server.url}{number}") as store:
        store.health()
    assert server.info("keyspace").keys() == {f"db{number.strip('/') or 0}"}


def test_a_unix_socket_has_databases_too(server):
    with registry.open(f"{server.unix_url}?db=3") as store:
        store.health()
    assert server.info("keyspace").keys() == {"db3"}


def test_options_are_as_the_manual_writes_them():
    """Its table is to be copied from."""
    manual = (Path(__file__).parents[3] / "docs" / "backends" / "redis.md").read_text()
    names = {field.name for field in msgspec.structs.fields(RedisOptions)}
    written = re.findall(r"[`?& ](\w+)=([\w.:/,-]+)", manual)
    found = [(name, value) for name, value in written if name in names]
    assert {"ttl", "prefix", "connections", "window", "mode"} <= {name for name, _ in found}
    for name, value in found:
        assert load_options(RedisOptions, "redis", {name: value})


def test_defaults_can_be_made():
    assert RedisOptions().prefix == "l3:"


def test_passwords_are_not_shown():
    shown = repr(RedisOptions(username="u", password="sesame", sentinel_password="sesame"))
    assert "sesame" not in shown
    assert "username='u', password=...," in shown
