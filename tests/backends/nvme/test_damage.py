"""Segments that fail, or are damaged, cut, emptied, replaced or deleted by hand.

Pages there are misses; all others stay; what is stored again is there, also for who opens the store
afterwards; and the process lives.
"""

from __future__ import annotations

import os
import stat
import subprocess
from contextlib import suppress

import pytest

from l3store.backends.nvme.format import RECORD_BYTES, SUPERBLOCK_BYTES
from l3store.errors import BackendUnavailable
from tests.backends.nvme import _kit as kit
from tests.backends.nvme._kit import SEGMENT, SLOTS, heals, opened, put, readable, some

PAGES = some(4 * SLOTS)
"""Four segments full."""


def _filled(path, **options):
    """A store with `PAGES`, and the file of the second segment."""
    store = opened(path, **options)
    assert all(put(store, PAGES))
    return store, kit.segment_files(path)[1]


def _others_are_read(store, there):
    """Of `PAGES` all can be read but those `there`; returns which of those can."""
    done = readable(store, PAGES)
    assert [i for i, good in enumerate(done) if not good and i not in there] == []
    return [i for i in there if done[i]]


# -- a drive that fails in places -----------------------------------------------------------------


@pytest.mark.parametrize("io", ["direct", "page"])
def test_a_segment_that_cannot_be_read_is_misses(tmp_path, io):
    store, bad = _filled(tmp_path / "store", io=io)
    there = kit.pages_of(store, bad, PAGES)
    with store, kit.broken_drive(store, bad):
        assert _others_are_read(store, there) == []
        assert _others_are_read(store, there) == []


@pytest.mark.parametrize("io", ["direct", "page"])
def test_what_a_segment_refuses_goes_elsewhere(tmp_path, io):
    store, bad = _filled(tmp_path / "store", io=io)
    with store:
        assert store.delete([PAGES.keys[i] for i in kit.pages_of(store, bad, PAGES)[:5]])
        with kit.broken_drive(store, bad):
            more = some(2 * SLOTS, seed=1)
            assert all(put(store, more))
            assert kit.pages_of(store, bad, more) == []
            assert all(readable(store, more))


def test_eviction_goes_on_beside_a_segment_that_cannot_be_written(tmp_path):
    """Its pages cannot make room; those of all others can."""
    store, bad = _filled(tmp_path / "store", capacity=4 * SEGMENT)
    with store:
        with kit.broken_drive(store, bad):
            for seed in range(1, 9):
                assert all(put(store, some(seed=seed)))
                assert all(readable(store, some(seed=seed)))
        assert heals(store, some(seed=9))
        assert store.check_integrity() == []


def test_a_drive_that_is_gone_is_unavailable_or_misses_and_the_process_lives(tmp_path):
    store, _ = _filled(tmp_path / "store")
    with store:
        with kit.broken_drive(store, *kit.segment_files(tmp_path / "store")):
            assert readable(store, PAGES) == [False] * PAGES.count
        assert heals(store, PAGES)


def test_a_part_of_the_device_that_fails(tmp_path):
    """A real EIO of the block layer: the device ends before the segment does, for a while."""
    make = ("mkfs.ext4", "-q", "-O", "^has_journal", "-b", "4096", "-m0")
    with kit.on_loop(tmp_path / "disk", make=make) as (folder, device):
        store, _ = _filled(folder / "store")
        with store:
            kit.fill_up(folder)
            files = kit.segment_files(folder / "store")
            begins = {file: _first_block(file) * 4096 for file in files}
            bad = max(begins, key=begins.__getitem__)
            there = kit.pages_of(store, bad, PAGES)
            with open(tmp_path / "disk.img", "r+b") as image:
                whole = os.fstat(image.fileno()).st_size
                image.truncate(begins[bad])
                subprocess.run(["losetup", "-c", device], check=True)
                try:
                    assert _others_are_read(store, there) == []
                    assert heals(store, some(2 * SLOTS, seed=1))
                finally:
                    image.truncate(whole)
                    subprocess.run(["losetup", "-c", device], check=True)
            kit.ten_seconds_pass(store)
            assert heals(store, PAGES)
            assert store.check_integrity() == []


@pytest.mark.parametrize("full", [False, True])
def test_a_segment_that_failed_is_used_again(tmp_path, full):
    store, bad = _filled(tmp_path / "store", capacity=4 * SEGMENT)
    with store:
        broken = kit.segment_files(bad.parent) if full else [bad]
        with kit.broken_drive(store, *broken), suppress(BackendUnavailable):
            put(store, some(seed=1))
        kit.ten_seconds_pass(store)
        assert heals(store, PAGES)
        assert store.check_integrity() == []


def _first_block(file):
    """Where a file lies on its device, by filefrag(8)."""
    for line in kit.run("filefrag", "-v", str(file)).splitlines():
        words = line.replace(":", " ").replace("..", " ").split()
        if words[0] == "0":
            return int(words[3])
    raise kit.NotHere(f"filefrag does not say where {file} lies")


# -- damage by hand -------------------------------------------------------------------------------


def _cut_to(size):
    return lambda file: os.truncate(file, size)


def _zeroed(first, behind):
    def damage(file):
        kit.overwrite(file, first, bytes(behind - first))

    return damage


def _noise(first, behind):
    def damage(file):
        kit.overwrite(file, first, (b"\xa5\x01\xff" * behind)[: behind - first])

    return damage


def _replaced(file):
    """By another whole segment, as a careless restore does."""
    data = kit.segment_files(file.parent)[2].read_bytes()
    file.unlink()
    file.write_bytes(data)


DATA = 2 * SUPERBLOCK_BYTES
DAMAGES = {
    "superblock zeroed": _zeroed(0, SUPERBLOCK_BYTES),
    "superblock noise": _noise(0, SUPERBLOCK_BYTES),
    "format of another version": lambda file: kit.overwrite(file, 8, (9).to_bytes(4, "little")),
    "table zeroed": _zeroed(SUPERBLOCK_BYTES, DATA),
    "table noise": _noise(SUPERBLOCK_BYTES, DATA),
    "half the table zeroed": _zeroed(SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + 7 * RECORD_BYTES),
    "slots zeroed": _zeroed(DATA, SEGMENT),
    "slots noise": _noise(DATA, SEGMENT),
    "all zeroed": _zeroed(0, SEGMENT),
    "cut to nothing": _cut_to(0),
    "cut in the superblock": _cut_to(100),
    "cut in the table": _cut_to(SUPERBLOCK_BYTES + 3 * RECORD_BYTES + 5),
    "cut in a slot": _cut_to(DATA + 5 * 4096 + 9),
    "too long": _cut_to(2 * SEGMENT),
    "deleted": lambda file: file.unlink(),
    "replaced by another": _replaced,
}
damages = pytest.mark.parametrize("damage", DAMAGES.values(), ids=[*DAMAGES])


@damages
def test_a_segment_that_was_damaged_while_the_store_was_closed(tmp_path, damage):
    store, file = _filled(tmp_path / "store")
    there = kit.pages_of(store, file, PAGES)
    store.close()
    damage(file)
    with opened(tmp_path / "store") as store:
        _others_are_read(store, there)
        assert heals(store, PAGES)
        assert store.batch_exists(PAGES.keys) == PAGES.count
    with opened(tmp_path / "store") as store:
        assert all(readable(store, PAGES))


@damages
def test_a_segment_that_is_damaged_under_its_owner(tmp_path, peer, damage):
    """Within a second its owner has looked after it. A peer reads nothing wrong meanwhile."""
    store, file = _filled(tmp_path / "store")
    other = peer().open(tmp_path / "store")
    with store:
        there = kit.pages_of(store, file, PAGES)
        damage(file)
        done = other.readable(PAGES)
        assert [i for i, good in enumerate(done) if not good and i not in there] == []
        kit.look_after(store)
        _others_are_read(store, there)
        assert heals(store, PAGES)
        assert all(other.readable(PAGES))
        with opened(tmp_path / "store", mode="ro") as third:
            assert all(readable(third, PAGES))
    with opened(tmp_path / "store") as store:
        assert all(readable(store, PAGES))


@damages
def test_a_full_store_with_a_damaged_segment_goes_on(tmp_path, damage):
    store, file = _filled(tmp_path / "store", capacity=4 * SEGMENT)
    store.close()
    damage(file)
    with opened(tmp_path / "store") as store:
        for seed in range(1, 9):
            assert all(put(store, some(seed=seed)))
            assert all(readable(store, some(seed=seed)))
    with opened(tmp_path / "store") as store:
        assert all(readable(store, some(seed=8)))


# -- what the store notices, and what it tells ----------------------------------------------------


def test_a_page_that_was_damaged_is_a_miss_and_heals(tmp_path):
    with opened(tmp_path / "store") as store:
        assert all(put(store, some()))
        kit.spoil(store, some().keys[3])
        done = readable(store, some())
        assert [i for i, good in enumerate(done) if not good] == [3]
        assert store.exists_each(some().keys) == done
        assert heals(store, some())
        assert store.check_integrity() == []


def test_a_record_that_was_cleared_behind_its_back_is_told_and_then_a_miss(tmp_path):
    with opened(tmp_path / "store") as store:
        assert all(put(store, some()))
        key = some().keys[3]
        path, slot, _ = kit.where(store, key)
        kit.clear_record(store, key)
        (problem,) = store.check_integrity()
        assert os.path.basename(path) in problem
        assert f"slot {slot}" in problem
        assert key[-64:] in problem
        assert [i for i, good in enumerate(readable(store, some())) if not good] == [3]
        assert store.check_integrity() == []
        assert heals(store, some())


def test_a_file_of_another_size_is_told(tmp_path):
    with opened(tmp_path / "store") as store:
        assert all(put(store, some()))
        (file,) = kit.segment_files(tmp_path / "store")
        os.truncate(file, SEGMENT + 1)
        assert store.check_integrity() == [f"seg-000000 has {SEGMENT + 1} bytes, not {SEGMENT}"]


def test_a_file_that_is_gone_is_told(tmp_path):
    with opened(tmp_path / "store") as store:
        assert all(put(store, some()))
        kit.segment_files(tmp_path / "store")[0].unlink()
        assert any("seg-000000 is gone" in problem for problem in store.check_integrity())


# -- what does not belong there -------------------------------------------------------------------


def _folder(path):
    path.mkdir()
    (path / "thesis.tex").write_text("precious")


def _link(path):
    target = path.parent.parent / "precious"
    target.write_bytes(b"precious" * 1000)
    path.symlink_to(target)


STRANGERS = {
    "folder": _folder,
    "link": _link,
    "pipe": os.mkfifo,
    "empty": lambda path: path.touch(),
    "text": lambda path: path.write_text("not a segment"),
}


@pytest.mark.parametrize("name", ["seg-000001", "seg-000003"])
@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=[*STRANGERS])
def test_what_stands_in_the_place_of_a_segment_is_passed_by(tmp_path, stranger, name):
    """Also when the store is full: a file or link there may be taken for a dead segment, what it
    leads to and what is in a folder never."""
    path = tmp_path / "store"
    opened(path, capacity=4 * SEGMENT).close()
    stranger(path / name)
    with opened(path) as store:
        for seed in range(9):
            assert all(put(store, some(seed=seed)))
            assert all(readable(store, some(seed=seed)))
    with opened(path) as store:
        assert all(readable(store, some(seed=8)))
    if stranger is _folder:
        assert (path / name / "thesis.tex").read_text() == "precious"
    if stranger is _link:
        assert (tmp_path / "precious").read_bytes() == b"precious" * 1000


@pytest.mark.parametrize(
    "name",
    ["seg-abc", "seg-1", "seg-0000001", "seg-000016", "seg-999999", "seg-", "lost+found", "notes"],
)
def test_other_names_are_left_alone(tmp_path, name):
    """Also numbers that this store has not, such as one that was larger once may have left."""
    path = tmp_path / "store"
    opened(path).close()
    (path / name).write_text("precious")
    with opened(path) as store:
        for seed in range(20):
            assert all(put(store, some(seed=seed)))
        assert all(readable(store, some(seed=19)))
        assert len(kit.segment_files(path)) - name.startswith("seg-") == 16
    assert (path / name).read_text() == "precious"


def test_files_and_folders_of_a_store_are_its_owners_alone(tmp_path):
    with opened(tmp_path / "store") as store:
        assert all(put(store, some()))
        store.put_meta("kit-0", b"x")
        for file in (tmp_path / "store").rglob("*"):
            found = file.lstat().st_mode
            wanted = 0o700 if stat.S_ISDIR(found) else 0o600
            assert stat.S_IMODE(found) == wanted or file.name == "store.json", file
