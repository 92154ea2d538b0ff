"""Opening a store: what is refused and why, what holds for all who open it, and only looking."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from l3store import registry
from l3store.backends.nvme import NvmeOptions, estate, growth, keeper, locks, shelf
from l3store.cli import main
from l3store.errors import BackendUnavailable, ConfigError
from tests.backends.nvme import _kit as kit
from tests.backends.nvme._kit import SEGMENT, SLOTS, heals, opened, put, readable, some


def _refused(path, match, **options):
    with pytest.raises(ConfigError, match=match):
        opened(path, **options)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"capacity": 3 * SEGMENT}, 4 * SEGMENT),
        ({"capacity": 4 * SEGMENT - 1}, 4 * SEGMENT),
        ({"capacity": 1}, 4 * SEGMENT),
        ({"capacity": "63MiB", "segment": "16MiB"}, 64 << 20),
    ],
)
def test_less_than_four_segments_is_refused_with_the_least(tmp_path, options, least):
    _refused(tmp_path / "s", rf"less than four segments of \d+ bytes; the least is {least}",
             **options)  # fmt: skip
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("capacity", "size", "count"),
    [
        ("64MiB", 16 << 20, 4),
        ("1GiB", 16 << 20, 64),
        ("32GiB", 512 << 20, 64),
        ("100GiB", 1 << 30, 100),
        ("1000000000", 16 << 20, 59),
    ],
)
def test_a_new_store_has_segments_of_a_64th_between_16_mib_and_1_gib(
    tmp_path, capacity, size, count
):
    registry.open(f"nvme://{tmp_path}/s?capacity={capacity}", raw=True).close()
    marker = json.loads((tmp_path / "s" / "store.json").read_bytes())
    assert marker["settings"] == {"segment_bytes": size, "segments": count}


@pytest.mark.parametrize("size", [4096, 12288, 65537, 16384 + 512])
def test_odd_and_tiny_segments_are_refused_with_the_nearest(tmp_path, size):
    with pytest.raises(ConfigError, match=r"'segment'.* multiple of 4096 and at least") as caught:
        opened(tmp_path / "s", segment=size)
    nearest = int(str(caught.value).rpartition(" ")[2])
    assert abs(nearest - size) <= 12288
    opened(tmp_path / "s", segment=nearest).close()


def test_a_store_is_opened_as_it_was_made(tmp_path):
    opened(tmp_path / "s", capacity=5 * SEGMENT).close()
    for options in ({}, {"capacity": 5 * SEGMENT}, {"capacity": 5 * SEGMENT + 1},
                    {"segment": SEGMENT}):  # fmt: skip
        with opened(tmp_path / "s", **options) as store:
            put(store, some(10 * SLOTS))
            assert kit.stored_bytes(tmp_path / "s") == 5 * SEGMENT


def test_another_segment_size_is_refused_with_both(tmp_path):
    opened(tmp_path / "s").close()
    _refused(tmp_path / "s", rf"'segment': {2 * SEGMENT} bytes, but .* made with {SEGMENT}",
             segment=2 * SEGMENT)  # fmt: skip


def _follow(path, advice):
    """Does what the message says."""
    marker = json.loads((path / "store.json").read_bytes())
    name, count = advice.rpartition(" into its store.json")[0].split()[-2:]
    marker["settings"][name.strip('":')] = int(count)
    (path / "store.json").write_text(json.dumps(marker))


@pytest.mark.parametrize("segments", [5, 30])
def test_another_capacity_is_refused_with_what_to_do(tmp_path, segments):
    """And who does it has a store of the new capacity, larger or smaller."""
    path = tmp_path / "s"
    with opened(path) as store:
        assert all(put(store, some(16 * SLOTS)))
    with pytest.raises(ConfigError, match=rf"made with {16 * SEGMENT}; to change it") as caught:
        opened(path, capacity=segments * SEGMENT)
    _follow(path, str(caught.value))
    with opened(path, capacity=segments * SEGMENT) as store:
        for seed in range(1, 40):
            assert all(put(store, some(seed=seed)))
        assert all(readable(store, some(seed=39)))
        assert kit.stored_bytes(path) == segments * SEGMENT
        assert store.check_integrity() == []


@pytest.mark.parametrize("settings", [{}, {"segments": 16}, {"segment_bytes": SEGMENT}])
def test_a_marker_that_lacks_a_setting_is_refused(tmp_path, settings):
    opened(tmp_path / "s").close()
    marker = {"format": 1, "kind": "nvme", "settings": settings}
    (tmp_path / "s" / "store.json").write_text(json.dumps(marker))
    _refused(tmp_path / "s", "store.json")


@pytest.mark.parametrize(
    "settings",
    [
        {"segment_bytes": 0, "segments": 16},
        {"segment_bytes": -4096, "segments": 16},
        {"segment_bytes": 4096, "segments": 16},
        {"segment_bytes": SEGMENT + 1, "segments": 16},
        {"segment_bytes": SEGMENT, "segments": 0},
        {"segment_bytes": SEGMENT, "segments": -1},
        {"segment_bytes": SEGMENT, "segments": 3},
        {"segment_bytes": SEGMENT, "segments": 10_000_000},
    ],
)
def test_settings_that_no_store_can_have_are_refused_by_name(tmp_path, settings):
    opened(tmp_path / "s").close()
    marker = {"format": 1, "kind": "nvme", "settings": settings}
    (tmp_path / "s" / "store.json").write_text(json.dumps(marker))
    _refused(tmp_path / "s", r"store\.json.*segment")


def test_a_newer_format_is_refused_with_both_numbers(tmp_path):
    opened(tmp_path / "s").close()
    (tmp_path / "s" / "store.json").write_text('{"format": 2, "kind": "nvme"}')
    before = kit.tree(tmp_path)
    _refused(tmp_path / "s", "format 2; this version reads format 1")
    assert kit.tree(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"evict": "lur"}, "did you mean 'lru'"),
        ({"capcity": "1GiB"}, "did you mean 'capacity'"),
        ({"writers": 0}, "option 'writers' must be positive"),
        ({"workers": -1}, "option 'workers' must be positive"),
        ({"io": "mmap"}, "io"),
        ({"durability": "always"}, "durability"),
        ({"mode": "read"}, "mode"),
    ],
)
def test_a_wrong_option_is_refused_by_name(tmp_path, options, match):
    _refused(tmp_path / "s", match, **options)
    assert not (tmp_path / "s").exists()


def test_more_writers_than_segments_are_refused_with_the_most(tmp_path):
    opened(tmp_path / "s", writers=16).close()
    _refused(tmp_path / "s", "option 'writers': 17.* the most is 16", writers=17)


@pytest.mark.parametrize("size", [SEGMENT, 2 * SEGMENT, 1 << 20])
def test_a_page_larger_than_a_segment_is_refused_with_the_largest(tmp_path, size):
    with opened(tmp_path / "s") as store:
        largest = store.capabilities.max_page_bytes
        with pytest.raises(ValueError, match=f"at most {largest}"):
            put(store, some(1, size=size))
        pages = some(2, size=largest - 128, seed=1, place="kit-0/large/all")
        assert heals(store, pages)
        assert store.check_integrity() == []


def test_a_place_whose_pages_change_their_length(tmp_path):
    """A namespace names what must match: another length is another namespace."""
    with opened(tmp_path / "s") as store:
        assert all(put(store, some()))
        for length in (4095, 4097, 8192, 1):
            with pytest.raises(ValueError, match=f"have 4096 payload bytes .* not {length}"):
                put(store, some(seed=1, size=length))
            with pytest.raises(ValueError, match=f"have 4096 payload bytes .* not {length}"):
                readable(store, some(size=length))
        assert heals(store, some(seed=1, size=4097, place="kit-1/kv/all"))
        assert all(readable(store, some()))


# -- two stores in one process --------------------------------------------------------------------


def test_a_store_may_be_opened_twice_in_one_process(tmp_path):
    with opened(tmp_path / "s", writers=2) as one, opened(tmp_path / "s", writers=2) as two:
        assert all(put(one, some()))
        assert all(readable(two, some()))
        assert all(put(two, some(seed=1)))
        assert all(readable(one, some(seed=1)))
        assert one.check_integrity() == two.check_integrity() == []
    for store in (one, two):
        store.close()
        with pytest.raises(BackendUnavailable, match="closed"):
            store.batch_exists(some().keys)


def test_a_store_leaves_no_descriptors_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with opened(tmp_path / "s") as store:
            assert all(put(store, some(14 * SLOTS)))
            assert all(readable(store, some(14 * SLOTS)))
            assert len(os.listdir("/proc/self/fd")) > before
        del store
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_segments_than_descriptors(tmp_path, peer):
    """A store opens what it uses, and closes what it has not used for longest."""
    one = peer()
    one.do("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (900, 900))")
    one.open(tmp_path / "s", capacity=1000 * 16384, segment=16384)
    pages = some(1000)
    assert all(one.put(pages))
    assert len(kit.segment_files(tmp_path / "s")) > 450
    assert all(one.readable(pages))
    assert one.problems() == []


# -- only looking ---------------------------------------------------------------------------------


def test_looking_creates_and_changes_nothing_beside_a_live_writer(tmp_path, peer):
    path = tmp_path / "s"
    writer = peer().open(path)
    assert all(writer.put(some()))
    writer.do("look_after(store)")
    writer.do("store._keeper.close()")  # it would note its counters in between
    before = kit.tree(path)
    with opened(path, mode="ro") as store:
        assert all(readable(store, some()))
        assert store.capabilities.read_only
        assert put(store, some(2, seed=1)) == [False, False]
        assert store.check_integrity() == []
        store.health()
        kit.spoil(store, some().keys[3])
        assert [i for i, good in enumerate(readable(store, some())) if not good] == [3]
        with pytest.raises(NotImplementedError):
            store.delete(some().keys)
        with pytest.raises(BackendUnavailable):
            store.put_meta("kit-0", b"x")
        after = kit.tree(path)
        assert {name: one[:2] for name, one in after.items()} == {
            name: one[:2] for name, one in before.items()
        }
        assert [name for name in after if after[name] != before[name]] == ["seg-000000"]  # `spoil`
        assert all(writer.put(some(seed=2)))
        assert all(readable(store, some(seed=2)))


def test_looking_at_a_store_that_is_not_there_makes_none(tmp_path):
    _refused(tmp_path / "s", "cannot be opened", mode="ro")
    (tmp_path / "empty").mkdir()
    _refused(tmp_path / "empty", "not a store", mode="ro")
    assert kit.tree(tmp_path / "empty") == {}


def test_who_looks_takes_no_writer_and_holds_no_lock(tmp_path, peer):
    """A writer that dies is taken over by one that writes, however many look on."""
    path = tmp_path / "s"
    writer = peer().open(path)
    assert all(writer.put(some()))
    with opened(path, mode="ro") as looking:
        assert all(readable(looking, some()))
        writer.kill()
        with opened(path) as store:
            assert all(put(store, some(seed=1)))
            assert len(list((path / "writers").glob("*.journal"))) == 1
            assert all(readable(looking, some(seed=1)))


def _cli(*words):
    done = CliRunner().invoke(main, [*words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done


def test_the_command_line_shows_a_live_store_and_leaves_it_alone(tmp_path, peer):
    path = tmp_path / "s"
    writer = peer().open(path)
    assert all(writer.put(some()))
    writer.do("look_after(store)")
    writer.do("store._keeper.close()")
    before, address = kit.tree(path), f"nvme://{path}"
    assert "kit-0" in _cli("ls", address).output
    stat = json.loads(_cli("stat", address, "--json").output)
    assert (stat["pages"], stat["health"]) == (SLOTS, "ok")
    verified = json.loads(_cli("verify", address, "--json").output)
    assert (verified["pages"], verified["bad_pages"]) == (SLOTS, 0)
    assert kit.tree(path) == before
    assert all(writer.put(some(seed=1)))
    assert json.loads(_cli("stat", address, "--json").output)["pages"] == 2 * SLOTS
    assert writer.problems() == []


def test_verify_finds_and_removes_damage_in_a_live_store(tmp_path, peer):
    path = tmp_path / "s"
    writer = peer().open(path)
    assert all(writer.put(some()))
    writer.do("spoil(store, key)", key=some().keys[5])
    done = _cli("verify", f"nvme://{path}", "--json")
    seen = json.loads(done.output)
    assert (done.exit_code, seen["bad_pages"], seen["reasons"]) == (1, 1, {"payload": 1})
    assert writer.has(some()) == [True] * SLOTS
    removed = json.loads(_cli("verify", f"nvme://{path}", "--delete", "--json").output)
    assert removed["deleted_pages"] == 1
    assert [i for i, good in enumerate(writer.has(some())) if not good] == [5]
    assert all(writer.put(some()))
    assert json.loads(_cli("verify", f"nvme://{path}", "--json").output)["bad_pages"] == 0
    assert writer.problems() == []


# -- clocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("years", [-60, -1, 1, 200])
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch, years):
    """Neither while the store is open nor between two who open it."""
    path, now = tmp_path / "s", time.time
    with opened(path, capacity=4 * SEGMENT) as store:
        assert all(put(store, some(2 * SLOTS)))
        monkeypatch.setattr(time, "time", lambda: now() + years * 365 * 86400)
        for seed in range(1, 9):
            assert all(put(store, some(seed=seed)))
        assert all(readable(store, some(seed=8)))
        assert store.check_integrity() == []
    with opened(path) as store:
        assert all(readable(store, some(seed=8)))
        assert heals(store, some(seed=9))
        assert store.check_integrity() == []


def test_a_monotonic_clock_that_leaps_ahead_changes_nothing(tmp_path, monkeypatch):
    """As in a machine that was suspended; back it never goes."""
    path, begun = tmp_path / "s", time.monotonic
    with opened(path, capacity=4 * SEGMENT) as store:
        assert all(put(store, some()))
        clock = SimpleNamespace(
            monotonic=lambda: begun() + 1e6, sleep=time.sleep, time=time.time
        )  # fmt: skip
        for module in (estate, growth, keeper, locks, shelf):
            monkeypatch.setattr(module, "time", clock)
        for seed in range(1, 9):
            assert all(put(store, some(seed=seed)))
            assert all(readable(store, some(seed=seed)))
        kit.look_after(store)
        assert kit.stored_bytes(path) == 4 * SEGMENT
        assert store.check_integrity() == []


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (2, 2), (3, 3), (64, 4)])
def test_threads_follow_the_cores_that_this_process_may_use(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert NvmeOptions().threads == threads
    assert NvmeOptions(workers=7).threads == 7
