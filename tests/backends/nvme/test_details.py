"""What `l3store stat` tells of an nvme store."""

from __future__ import annotations

import json

from click.testing import CliRunner

from l3store import page, registry
from l3store.backends.nvme import catalog
from l3store.cli.stat import command
from l3store.testing.kit import Pages

SIZE = 8192


def _open(path, **options):
    query = "".join(f"&{name}={value}" for name, value in options.items())
    return registry.open(f"nvme://{path}/s?segment=256KiB&capacity=4MiB{query}", raw=True)


def _read(store, pages):
    done = store.page_get(pages.keys, pages.room().pages, page.opener(pages.keys))
    store._chores.tell()
    return done


def test_a_chain_is_one_run_and_is_read_as_one(tmp_path):
    pages = Pages(count=8, size=SIZE)
    with _open(tmp_path) as store:
        store.page_set(pages.keys, pages.sealed())
        assert store.details()["pages a run, as read"] == "nothing was read"
        assert _read(store, pages) == [True] * 8
        seen = store.details()
    assert seen["mean run bytes"] == 8 * SIZE
    assert seen["pages a run, as read"] == 8.0
    assert seen["segments"] == "1 of 16"
    assert seen["capacity bytes"] == 4 << 20
    assert seen["writers"] == 1
    assert (seen["recycled reads"], seen["damaged reads"]) == (0, 0)
    assert seen["scrub"] == "done"


def test_a_chain_with_a_gap_is_two_runs(tmp_path):
    pages = Pages(count=8, size=SIZE)
    with _open(tmp_path) as store:
        store.page_set(pages.keys, pages.sealed())
        store.delete(pages.keys[3:5])
        assert store.details()["mean run bytes"] == 3 * SIZE


def test_damaged_reads_are_told_to_those_who_only_look(tmp_path):
    pages = Pages(count=2, size=SIZE)
    with _open(tmp_path) as store:
        store.page_set(pages.keys, pages.sealed())
        with open(tmp_path / "s" / "seg-000000", "r+b") as file:
            segment = store._catalog.segments[0]
            file.seek(segment.geometry.data_offset)
            file.write(bytes(SIZE))
        assert _read(store, pages) == [False, True]
        shown = CliRunner().invoke(command, [f"nvme://{tmp_path}/s", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["details"]["damaged reads"] == 1


def test_recycled_reads_are_counted_and_no_damage(tmp_path):
    pages = Pages(count=1, size=SIZE)
    with _open(tmp_path) as store, _open(tmp_path) as peer:
        peer.page_set(pages.keys, pages.sealed())
        assert store.batch_exists(pages.keys) == 1
        store._catalog.refresh = lambda: None  # it has not heard yet
        peer.delete(pages.keys)
        check = page.opener(pages.keys)
        assert store.page_get(pages.keys, pages.room().pages, check) == [False]
        store._chores.tell()
        del store._catalog.refresh
        seen = store.details()
    assert not check.reasons
    assert (seen["recycled reads"], seen["damaged reads"]) == (1, 0)


def test_after_a_power_cut_it_says_what_is_to_be_checked(tmp_path, monkeypatch):
    pages = Pages(count=5, size=SIZE)
    with _open(tmp_path) as store:
        store.page_set(pages.keys, pages.sealed())
    monkeypatch.setattr(catalog, "boot_id", lambda: b"another boot.id.")
    with _open(tmp_path, scrub_rate=0) as store:
        assert store.details()["scrub"] == "5 pages to check since the machine went down"
        assert _read(store, pages) == [True] * 5
        assert store.details()["scrub"] == "done"
    shown = CliRunner().invoke(command, [f"nvme://{tmp_path}/s"])
    assert "mean run bytes" in shown.output
    assert "5 pages to check" in shown.output


def test_the_wrappers_pass_it_on(tmp_path):
    with registry.open(f"nvme://{tmp_path}/s?capacity=64MiB") as store:
        assert store.details()["capacity bytes"] == 64 << 20
