"""What the URL says, and what the environment says in its place."""

from __future__ import annotations

import pytest

from l3store.backends.mooncake.options import Address, from_url, parse_address
from l3store.config import StoreURL
from l3store.errors import ConfigError

NAMES = ("MASTER", "PROTOCOL", "DEVICE", "TE_META_DATA_SERVER", "LOCAL_HOSTNAME",
         "GLOBAL_SEGMENT_SIZE", "LOCAL_BUFFER_SIZE")  # fmt: skip


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(f"MOONCAKE_{name}", raising=False)


def read(text):
    return from_url(StoreURL.parse(text))


def test_defaults():
    address, options = read("mooncake://master")
    assert address == Address("master", 50051)
    assert (options.protocol, options.device, options.metadata) == ("tcp", "", "P2PHANDSHAKE")
    assert (options.segment, options.local_buffer, options.host) == (0, 0, "")
    assert (options.prefix, options.admin, options.mode) == ("l3store", None, "rw")


def test_the_environment_stands_in_and_the_url_is_above_it(monkeypatch):
    for name, value in {
        "MASTER": "m1:7000", "PROTOCOL": "RDMA", "DEVICE": "mlx5_0", "LOCAL_HOSTNAME": "here",
        "TE_META_DATA_SERVER": "http://m1:8080/metadata", "GLOBAL_SEGMENT_SIZE": "4gb",
        "LOCAL_BUFFER_SIZE": "1048576",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"MOONCAKE_{name}", value)
    address, options = read("mooncake://")
    assert address == Address("m1", 7000)
    assert (options.protocol, options.device, options.host) == ("rdma", "mlx5_0", "here")
    assert options.metadata == "http://m1:8080/metadata"
    assert (options.segment, options.local_buffer) == (4 << 30, 1 << 20)
    address, options = read("mooncake://m2:1?protocol=tcp&segment=16MiB&local_buffer=0&host=there")
    assert address == Address("m2", 1)
    assert (options.protocol, options.segment, options.local_buffer) == ("tcp", 16 << 20, 0)
    assert options.host == "there"


def test_port_0_is_not_the_default_one_and_spaces_are_no_part_of_a_name(monkeypatch):
    assert read("mooncake://m:0")[0] == Address("m", 0)
    monkeypatch.setenv("MOONCAKE_MASTER", " m1:7000 ")
    assert read("mooncake://")[0] == Address("m1", 7000)
    monkeypatch.setenv("MOONCAKE_MASTER", " ")
    with pytest.raises(ConfigError, match="does not say where"):
        read("mooncake://")


def test_ours_is_above_theirs(monkeypatch):
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("L3STORE_MOONCAKE_PROTOCOL", "tcp")
    assert read("mooncake://m")[1].protocol == "tcp"


@pytest.mark.parametrize(
    ("text", "size"),
    [("512m", 512 << 20), ("1.5GB", 3 << 29), ("2 k", 2048), ("16MiB", 16 << 20), ("", 0)],
)
def test_sizes_as_mooncake_writes_them(monkeypatch, text, size):
    monkeypatch.setenv("MOONCAKE_LOCAL_BUFFER_SIZE", text)
    assert read("mooncake://m")[1].local_buffer == size


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mooncake://", "MOONCAKE_MASTER"),
        ("mooncake://m/l3", "prefix=l3"),
        ("mooncake://user:secret@m", "no users"),
        ("mooncake://m?protocol=tpc", "did you mean 'tcp'"),
        ("mooncake://m?prefix=a/b", "prefix"),
        ("mooncake://m:7/path?timeout=1s", r"did you mean mooncake://m:7\?prefix=path"),
        ("mooncake://m?prefix=", "prefix"),
        ("mooncake://m?timeout=0", "timeout"),
        ("mooncake://m?connect_timeout=2h", "connect_timeout"),
        ("mooncake://m?segmnt=1GiB", "did you mean 'segment'"),
        ("mooncake://m?mode=w", "mode"),
        ("mooncake://m?unregistered=maybe", "unregistered"),
        ("mooncake://m?segment=much", "segment"),
        ("mooncake://m?segment=15MiB", "16MiB or more"),
    ],
)
def test_what_is_wrong_is_told(url, says):
    with pytest.raises(ConfigError, match=says) as caught:
        read(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MASTER", "a:b:c"), ("MASTER", "m:99999"), ("PROTOCOL", "smoke"),
     ("GLOBAL_SEGMENT_SIZE", "lots")],
)  # fmt: skip
def test_what_is_wrong_in_the_environment_is_told_by_its_name(monkeypatch, name, value):
    monkeypatch.setenv("MOONCAKE_MASTER", "m")
    monkeypatch.setenv(f"MOONCAKE_{name}", value)
    with pytest.raises(ConfigError, match="MOONCAKE_"):
        read("mooncake://")


def test_addresses():
    assert parse_address("m", "x", 5) == ("m", 5)
    assert parse_address("[::1]:70", "x", 5) == ("::1", 70)
    assert str(Address("::1", 70)) == "[::1]:70"
    assert str(Address("m", 70)) == "m:70"
