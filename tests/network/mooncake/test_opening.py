"""What is wrong with an address, an option or an installation is told at start."""

from __future__ import annotations

import time

import pytest

from l3store import page, registry
from l3store.backends.mooncake import library
from l3store.errors import BackendUnavailable, ConfigError
from l3store.servers.mooncake import LEAST_SEGMENT, MooncakeServer
from l3store.servers.process import free_ports
from l3store.testing.faults import failing
from l3store.testing.kit import Pages

PAGES = Pages(count=4, size=8192, segments=3)


def test_nobody_at_the_address(mooncake_server):
    (port,) = free_ports(1)
    error = failing(lambda: registry.open(f"mooncake://127.0.0.1:{port}"), within=2)
    assert f"no Mooncake master answers at 127.0.0.1:{port}" in str(error)


def test_nobody_at_the_address_though_our_own_is_given():
    """The library alone would ask for 5 s, and hold the interpreter's lock."""
    (port,) = free_ports(1)
    where = f"mooncake://127.0.0.1:{port}?host=127.0.0.1"
    error = failing(lambda: registry.open(where), within=2)
    assert f"no Mooncake master answers at 127.0.0.1:{port}" in str(error)


@pytest.mark.parametrize("used", [False, True])
def test_the_admin_port_of_another_master(mooncake_server, url, used):
    """Also where that master has a store of the same prefix."""
    with MooncakeServer(segment=LEAST_SEGMENT) as other:
        if used:
            registry.open(f"{other.url}&prefix={url.rpartition('=')[2]}").close()
        wrong = url.replace(f"admin={mooncake_server.admin_port}", f"admin={other.admin_port}")
        with pytest.raises(ConfigError, match=f"{other.admin_port} is not that of"):
            registry.open(wrong)
    with registry.open(url + "&mode=ro"):
        pass


@pytest.mark.parametrize("option", ["metadata=http://127.0.0.1:1/m", "local_buffer=100TiB"])
def test_what_the_library_refuses_is_told_by_its_name(url, option):
    with pytest.raises(ConfigError, match=option.replace("TiB", "").partition("00")[0]):
        registry.open(f"{url}&{option}")


def test_a_name_that_nobody_knows():
    error = failing(lambda: registry.open("mooncake://no-such-host.invalid"), within=10)
    assert "no-such-host.invalid:50051" in str(error)


def test_the_admin_port_is_not_the_masters(mooncake_server):
    wrong = f"mooncake://127.0.0.1:{mooncake_server.admin_port}"
    error = failing(lambda: registry.open(wrong), within=5)
    assert "not that of its metrics" in str(error)


def test_a_wrong_admin_port(mooncake_server):
    right = f"mooncake://127.0.0.1:{mooncake_server.port}"
    (port,) = free_ports(1)
    error = failing(lambda: registry.open(f"{right}?admin={port}"), within=5)
    assert f"admin port 127.0.0.1:{port}" in str(error)
    failing(lambda: registry.open(f"{right}?admin={mooncake_server.port}"), within=5)
    with pytest.raises(ConfigError, match="admin"):
        registry.open(f"{right}?admin=a:b:c")
    with pytest.raises(BackendUnavailable, match="admin port"):
        registry.open(f"{right}?admin=\N{SUPERSCRIPT TWO}&connect_timeout=50ms")


def test_a_protocol_that_this_machine_has_not(mooncake_server, url):
    with pytest.raises(ConfigError, match="protocol=rdma, device=none_0"):
        registry.open(url.replace("tcp", "rdma") + "&device=none_0")
    with pytest.raises(ConfigError, match=r"protocol=cxl"):
        registry.open(url.replace("tcp", "cxl"))


def test_two_wheels_are_refused(mooncake_server, url, tmp_path, monkeypatch):
    """They share one package: whichever came last has overwritten the other's files."""
    folder = tmp_path / "mooncake_transfer_engine-0.3.13.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mooncake-transfer-engine\nVersion: 0.3.13\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    library._wheels.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"mooncake-transfer-engine and .*-non-cuda"):
            registry.open(url)
    finally:
        library._wheels.cache_clear()


def test_without_the_admin_port_there_is_no_listing(mooncake_server, url):
    with registry.open(f"mooncake://127.0.0.1:{mooncake_server.port}", raw=True) as store:
        assert not store.capabilities.listing
        with pytest.raises(NotImplementedError, match="listing"):
            store.scan()
        with pytest.raises(NotImplementedError, match="listing"):
            store.usage()
        assert "owners of memory" not in store.details()


def test_details_tell_what_an_operator_asks(mooncake_server, url):
    with registry.open(url) as store:
        before = store.details()
        assert store.page_set(PAGES.keys, PAGES.sealed()) == [True] * 4
        found = store.details()
    assert found["owners of memory"] == 1
    assert found["bytes lent"] == 64 << 20
    assert found["bytes used"] - before["bytes used"] >= 4 * 8320
    assert found["master"] == f"127.0.0.1:{mooncake_server.port}"


def test_a_failed_opening_leaves_no_client(mooncake_server, url):
    mooncake_server.freeze()
    try:
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(BackendUnavailable):
                registry.open(url)
            assert time.monotonic() - start < 5
    finally:
        mooncake_server.thaw()
    with registry.open(url) as store:
        assert store.page_set(PAGES.keys, PAGES.sealed()) == [True] * 4


# -- registered memory -------------------------------------------------------------------------


def test_memory_that_nobody_announced_is_found_over_tcp_already(url):
    """With ``unregistered=refuse``; RDMA would fail on it."""
    with registry.open(url + "&unregistered=refuse", raw=True) as store:
        with pytest.raises(ValueError, match=r"segment 0 of page 0 .*register_buffer"):
            store.page_set(PAGES.keys, PAGES.sealed())
        pool = memoryview(bytearray(4 * 8320))
        into = [
            (pool[at : at + 128], pool[at + 128 : at + 4000], pool[at + 4000 : at + 8320])
            for at in range(0, len(pool), 8320)
        ]
        store.register_buffer(pool)
        store.register_buffer(pool)  # twice is once
        for page_, whole in zip(into, PAGES.sealed(), strict=True):
            data = b"".join(whole)
            for piece, at in zip(page_, (0, 128, 4000), strict=True):
                piece[:] = data[at : at + piece.nbytes]
        assert store.page_set(PAGES.keys, into) == [True] * 4
        pool[:] = bytes(len(pool))
        assert store.page_get(PAGES.keys, into, page.opener(PAGES.keys)) == [True] * 4
        assert [b"".join(p) == PAGES.stored(i) for i, p in enumerate(into)] == [True] * 4


@pytest.mark.parametrize("option", ["&unregistered=copy", "protocol"])
def test_what_is_not_registered_goes_by_way_of_memory_that_is(url, option):
    """As over RDMA, where headers and staging pages are not; without a device that is tcp, too."""
    given = url.replace("tcp", "rdma") if option == "protocol" else url + option
    with registry.open(given) as store:
        assert store.page_set(PAGES.keys, PAGES.sealed()) == [True] * 4
        room = PAGES.room(offset=3)
        assert store.page_get(PAGES.keys, room.pages) == [True] * 4
        assert PAGES.wrong([True] * 4, room) == []
        assert room.intact()
        frozen = [tuple(piece.toreadonly() for piece in one) for one in PAGES.sealed()]
        store.delete(PAGES.keys)
        assert store.page_set(PAGES.keys, frozen) == [True] * 4
        assert store.page_get(PAGES.keys, room.pages) == [True] * 4


def test_a_buffer_is_announced_for_as_long_as_a_store_is_open(url):
    pool = memoryview(bytearray(1 << 20))
    with registry.open(url, raw=True) as one, registry.open(url, raw=True) as two:
        registered = one._client.registered
        one.register_buffer(pool)
        start = one._buffers[0]
        two.register_buffer(pool)
        one.close()
        assert registered.covers(start, 1 << 20)
        two.close()
        assert not registered.covers(start, 1)
