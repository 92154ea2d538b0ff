"""Mooncake when a process that lends memory dies or stands still."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from l3store import registry
from l3store.errors import BackendUnavailable, CapacityError
from l3store.servers.process import wait_until
from l3store.testing.faults import DOWN, failing, get, until_well
from l3store.testing.kit import Pages
from l3store.testing.proxy import Proxy
from tests.network.mooncake.conftest import mounted

PAGES = Pages(count=6, size=100_000, segments=2)


def test_a_killed_owner_is_an_error_or_a_miss_and_a_new_one_serves(mooncake_server, raw):
    """The master says for a while that its pages are there."""
    until_well(raw, PAGES)
    mooncake_server.owners[0].kill()
    limit = time.monotonic() + 15
    while any(raw.exists_each(PAGES.keys)):  # the master has not noticed
        start = time.monotonic()
        with suppress(*DOWN):
            assert get(raw, PAGES)[0] == [False] * 6
        assert time.monotonic() - start < 8
        assert time.monotonic() < limit, "the master never notices"
    assert get(raw, PAGES)[0] == [False] * 6
    mounted(mooncake_server)
    with pytest.raises(BackendUnavailable, match="no process lends memory"):
        raw.page_set(PAGES.keys, PAGES.sealed())
    mooncake_server.add_owner()
    until_well(raw, PAGES)


def test_without_the_admin_port_no_memory_at_all_is_a_full_store(mooncake_server, url):
    with registry.open(
        url.replace("admin", "timeout=1s&prefix=x&xadmin").split("&xadmin")[0]
    ) as store:
        until_well(store, PAGES)
        mooncake_server.owners[0].kill()
        mounted(mooncake_server)
        with pytest.raises(CapacityError, match="no process lends memory") as caught:
            store.page_set(PAGES.keys, PAGES.sealed())
        assert caught.value.done == [False] * 6


def test_with_an_admin_port_that_has_gone_it_is_a_full_store(mooncake_server, url):
    with Proxy(("127.0.0.1", mooncake_server.admin_port)) as proxy:
        admin = f"admin={proxy.port}"
        with registry.open(url.replace(f"admin={mooncake_server.admin_port}", admin)) as store:
            until_well(store, PAGES)
            mooncake_server.owners[0].kill()
            mounted(mooncake_server)
            proxy.refuse()
            with pytest.raises(CapacityError, match="no process lends memory") as caught:
                store.page_set(PAGES.keys, PAGES.sealed())
            assert caught.value.done == [False] * 6


def test_a_store_without_any_memory_is_not_opened(mooncake_server, url):
    mooncake_server.owners[0].kill()
    mounted(mooncake_server)
    error = failing(lambda: registry.open(url), within=5)
    assert "no process lends any" in str(error)


def test_of_two_owners_one_is_killed_and_the_pages_of_the_other_are_read(mooncake_server, raw):
    """And nothing that is called read is wrong."""
    mooncake_server.add_owner()
    pages = Pages(count=40, size=20_000)
    until_well(raw, pages)
    mooncake_server.owners[0].kill()
    done = failing(lambda: get(raw, pages), within=15).done
    assert any(done), "all pages lay with one of two owners"
    wait_until(lambda: raw.exists_each(pages.keys) == done, "the master notices")
    assert get(raw, pages)[0] == done
    until_well(raw, pages)
    assert raw.list_meta() == []


def test_what_is_known_of_a_store_outlives_one_of_two_owners(mooncake_server, url, raw):
    """Lengths and descriptors lie with both."""
    mooncake_server.add_owner()
    raw.put_meta("model", b"described")
    one = Pages(count=1, size=1000)
    raw.page_set(one.keys, one.sealed())
    mooncake_server.owners[0].kill()
    mounted(mooncake_server)
    with registry.open(url) as store:
        assert store.get_meta("model") == b"described"
        assert store.list_meta() == ["model"]
        other = Pages(count=1, size=2000, seed=1)
        with pytest.raises(ValueError, match="1000"):
            store.page_set(other.keys, other.sealed())


def test_a_descriptor_whose_name_was_lost_with_all_owners_is_listed_again(mooncake_server, raw):
    """The master lives, so nothing says that what it had is gone."""
    raw.put_meta("model", b"described")
    mooncake_server.owners[0].kill()
    mounted(mooncake_server)
    mooncake_server.add_owner()
    assert raw.list_meta() == []
    for _ in range(2):
        raw.put_meta("model", b"described")
        assert raw.list_meta() == ["model"]
    names = mooncake_server.keys()
    assert [one for one in names if "/name/" in one] == [f"{raw._options.prefix}/name/0"]


@pytest.mark.parametrize("late", ["staged", "wait"])
def test_a_frozen_owner_is_an_error_in_time_and_nothing_comes_late(mooncake_server, url, late):
    """Staged: at the deadline. Waiting: when the library gives up, a second a page."""
    pages = Pages(count=4, size=100_000)
    options = f"&deadline=500ms&late={late}&breaker_cooldown=50ms&breaker_max_cooldown=100ms"
    with registry.open(url + options) as store:
        until_well(store, pages)
        mooncake_server.owners[0].freeze()
        rooms = [pages.room() for _ in range(2)]
        for room in rooms:
            start = time.monotonic()
            with suppress(*DOWN):  # or a miss: the master gives an owner up that is silent
                assert store.page_get(pages.keys, room.pages) == [False] * 4
            assert time.monotonic() - start < (2 if late == "staged" else 20)
            room.reuse()
        mooncake_server.owners[0].thaw()
        mounted(mooncake_server)
        until_well(store, pages)
        time.sleep(0.1)
        assert all(room.untouched() for room in rooms)


def test_a_page_that_a_frozen_owner_did_not_take_is_not_called_stored(mooncake_server, url):
    with registry.open(url + "&deadline=500ms") as store:
        until_well(store, PAGES)
        new = Pages(count=6, size=100_000, segments=2, seed=1)
        sealed = new.sealed()
        mooncake_server.owners[0].freeze()
        with pytest.raises(DOWN) as caught:
            store.page_set(new.keys, sealed)
        assert not any(caught.value.done)
        for segments in sealed:  # the caller has its memory back
            for piece in segments:
                piece[:] = bytes(piece.nbytes)
        mooncake_server.owners[0].thaw()
        mounted(mooncake_server)
        until_well(store, new)
