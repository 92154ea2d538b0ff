"""Bad file systems, full and failing drives, damage by hand: a clear word, and the store goes on.

Nothing that was acknowledged is lost but what was damaged, nothing wrong is read, and the process
lives.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from l3store.backends.nvme import backend as nvme_backend
from l3store.errors import BackendUnavailable, CapacityError, ConfigError
from tests.backends.nvme import _kit as kit
from tests.backends.nvme._kit import SEGMENT, SLOTS, heals, opened, put, readable, some

# -- file systems ---------------------------------------------------------------------------------


def _lives(store, path, capacity=16 * SEGMENT):
    """A store takes more than it holds, in small calls, and keeps the newest."""
    for seed in range(24):
        assert all(put(store, some(seed=seed)))
        assert kit.stored_bytes(path) <= capacity
    assert all(readable(store, some(seed=23), offset=seed) for seed in range(2))
    assert store.check_integrity() == []


def _on(kind, folder):
    if kind in ("tmpfs", "ramfs"):
        return kit.in_memory(folder, kind, "8M")
    return kit.on_loop(folder, make=("mkfs.ext2", "-q"))


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "ext2"])
def test_file_systems_without_direct_io_or_fallocate_hold_stores(tmp_path, kind):
    """ramfs has neither, ext2 no fallocate, tmpfs no drive."""
    with _on(kind, tmp_path / "disk"):
        path = tmp_path / "disk" / "store"
        with opened(path) as store:
            assert store.capabilities.alignment == (1 if kind == "ramfs" else 512)
            _lives(store, path)
        with opened(path) as store:
            assert all(readable(store, some(seed=23)))
            assert store.check_integrity() == []


def test_drives_with_sectors_of_4096_bytes_take_pages_in_odd_pieces(tmp_path):
    """Direct I/O wants more of them: memory that does not fit goes through a buffer that does."""
    with kit.on_loop(tmp_path / "disk", sector=4096), opened(tmp_path / "disk" / "store") as store:
        for segments, size in ((1, 4096), (3, 4096), (5, 4097), (2, 12288)):
            pages = some(5, size=size, segments=segments, place=f"kit-0/kv{size}/T{segments}of9")
            assert all(put(store, pages))
            assert all(readable(store, pages, offset=1))


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "ceph", "fuse.sshfs"])
def test_shared_file_systems_are_refused_with_the_store_that_fits(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(nvme_backend, "file_system", lambda _path: kind)
    with pytest.raises(ConfigError, match=rf"lies on {kind},.*use file://{tmp_path}/store"):
        opened(tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("io", ["direct", "page"])
@pytest.mark.parametrize("size", [1, 511, 512, 4095, 4096, 4097, 12345])
def test_payloads_may_have_any_length_and_lie_anywhere(tmp_path, io, size):
    with opened(tmp_path / "store", io=io) as store:
        pages = [some(4, size=size, segments=n, seed=n, place=f"kit-0/kv/T{n}of9")
                 for n in (1, 3) if n <= size]  # fmt: skip
        for one in pages:
            assert all(put(store, one))
            for offset in (0, 1, 64, 511):
                assert all(readable(store, one, offset))
    with opened(tmp_path / "store", io=io) as store:
        assert all(all(readable(store, one)) for one in pages)
        assert store.check_integrity() == []


# -- full disks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "ext2"])
def test_a_full_disk_stops_the_growth_and_not_the_store(tmp_path, kind):
    disk = kit.in_memory(tmp_path / "disk") if kind == "tmpfs" else kit.on_loop(
        tmp_path / "disk", mib=5, make=(f"mkfs.{kind}", "-q", "-m0")
    )  # fmt: skip
    with disk:
        path = tmp_path / "disk" / "store"
        with opened(path, capacity="64MiB") as store:
            for seed in range(60):
                assert all(put(store, some(seed=seed))), seed
                assert all(readable(store, some(seed=seed)))
            assert 0 < len(kit.segment_files(path)) < 60
            assert {file.stat().st_size for file in kit.segment_files(path)} == {SEGMENT}
            assert store.check_integrity() == []
        with opened(path, capacity="64MiB") as store:
            assert all(readable(store, some(seed=59)))
            assert heals(store, some(seed=60))
            assert store.check_integrity() == []


def test_room_that_comes_back_is_used(tmp_path):
    with kit.in_memory(tmp_path / "disk") as disk:
        path = disk / "store"
        with opened(path, evict="none") as store:
            assert all(put(store, some()))
            filling = kit.fill_up(disk)
            with pytest.raises(CapacityError) as caught:
                put(store, some(seed=1))
            assert caught.value.done == [False] * SLOTS
            assert put(store, some(2)) == [True, True]
            assert store.batch_exists(some().keys) == SLOTS
            filling.unlink()
            kit.ten_seconds_pass(store)
            assert all(put(store, some(seed=1)))
            assert store.check_integrity() == []


@pytest.mark.parametrize("left", [0, 1 << 20, (2 << 20) + (16 << 10)])
def test_a_disk_that_is_full_at_the_start_is_told_as_full(tmp_path, left):
    """Without room for a journal, or with that and no room for a segment."""
    with kit.in_memory(tmp_path / "disk") as disk:
        opened(disk / "store").close()
        filling = kit.fill_up(disk, left)
        with opened(disk / "store") as store:
            with pytest.raises(CapacityError):
                put(store, some())
            assert readable(store, some()) == [False] * SLOTS
            assert kit.segment_files(disk / "store") == []
            assert store.check_integrity() == []
            filling.unlink()
            kit.ten_seconds_pass(store)
            assert heals(store, some())


@pytest.mark.parametrize("limit", [1 << 20, 3 << 20])
def test_a_limit_on_the_size_of_files_is_told_as_full(tmp_path, peer, limit):
    """A journal has 2 MiB, a segment here 4: each is refused, and no signal ends the process."""
    one = peer().open(tmp_path / "store", segment="4MiB", capacity="64MiB")
    one.do("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))",
           limit=limit)  # fmt: skip
    with pytest.raises(kit.PeerError, match="CapacityError"):
        one.put(some())
    assert one.has(some()) == [False] * SLOTS
    assert kit.segment_files(tmp_path / "store") == []
    assert one.problems() == []


# -- drives that cannot be written ----------------------------------------------------------------


def _writes_are_refused(store):
    with pytest.raises(BackendUnavailable):
        put(store, some(3, seed=99))
    with pytest.raises(BackendUnavailable):
        store.put_meta("kit-0", b"x")
    with pytest.raises(BackendUnavailable):
        store.health()


@pytest.mark.parametrize("durability", ["none", "batch"])
def test_a_file_system_that_turns_read_only_goes_on_being_read(tmp_path, durability):
    """ext4 does that to itself when it meets an error of the drive. Like a power cut it takes what
    was not synced."""
    path = tmp_path / "disk" / "store"
    options = ("-o", "errors=remount-ro")
    with kit.on_loop(tmp_path / "disk", options=options) as (folder, device):
        store = opened(path, durability=durability)
        assert all(put(store, some()))
        try:
            with open(f"/sys/fs/ext4/{os.path.basename(device)}/trigger_fs_error", "w") as trigger:
                trigger.write("x")
        except OSError as error:
            store.close()
            raise kit.NotHere(f"ext4 cannot be made to fail: {error}") from error
        assert all(readable(store, some()))
        assert store.batch_exists(some().keys) == SLOTS
        _writes_are_refused(store)
        assert all(readable(store, some()))
        store.close()
        with pytest.raises(ConfigError, match="Read-only file system"):
            opened(path)
        with opened(path, mode="ro") as store:
            assert all(readable(store, some()))
        subprocess.run(["umount", str(folder)], check=True)
        subprocess.run(["e2fsck", "-fy", device], check=False, capture_output=True)
        kit.run("mount", device, str(folder))
        with opened(path) as store:
            assert all(readable(store, some())) or durability == "none"
            assert heals(store, some(seed=1))
            assert store.check_integrity() == []


@pytest.mark.parametrize("pages", [5, 16 * SLOTS])
def test_a_store_that_is_protected_for_a_while_comes_back_by_itself(tmp_path, pages):
    """Immutable files refuse writes also through descriptors that are open. The larger store is
    full, and would have to evict."""
    if os.geteuid():
        raise kit.NotHere("only root may make files immutable")
    path = tmp_path / "store"
    with opened(path) as store:
        assert all(put(store, some(pages)))
        kit.run("chattr", "-R", "+i", str(path))
        try:
            assert all(readable(store, some(pages)))
            _writes_are_refused(store)
            with pytest.raises(BackendUnavailable):
                store.delete(some(pages).keys)
            assert all(readable(store, some(pages)))
        finally:
            kit.run("chattr", "-R", "-i", str(path))
        kit.ten_seconds_pass(store)
        store.health()
        assert store.batch_exists(some(pages).keys) == pages
        assert heals(store, some(3, seed=99))
        assert heals(store, some(pages))
        assert store.delete(some(pages).keys) == [True] * pages
        assert store.check_integrity() == []


def test_a_read_only_mount_opens_for_reading(tmp_path):
    path = tmp_path / "store"
    with opened(path) as store:
        assert all(put(store, some()))
    (tmp_path / "empty").mkdir()
    before = kit.tree(path)
    with kit.mounted(tmp_path / "view", "--bind", str(tmp_path)) as view:
        kit.run("mount", "-o", "remount,bind,ro", str(view))
        with opened(view / "store") as store:
            assert store.capabilities.read_only
            assert not store.capabilities.delete
            assert all(readable(store, some()))
            assert put(store, some(3, seed=1)) == [False] * 3
            store.health()
            assert store.check_integrity() == []
        with pytest.raises(ConfigError, match="not to be written"):
            opened(view / "empty")
    assert kit.tree(path) == before


def test_a_folder_of_somebody_else_opens_for_reading(tmp_path, peer):
    if os.geteuid():
        raise kit.NotHere("only root may become somebody else")
    path = tmp_path / "store"
    with opened(path) as store:
        assert all(put(store, some()))
    for folder in (tmp_path.parent.parent, tmp_path.parent, tmp_path, path, path / "writers"):
        folder.chmod(0o755)
    for file in path.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    before = kit.tree(path)
    other = peer()
    other.do("b'x'.decode('unicode_escape')")  # a module that it may not load any more afterwards
    other.do("os.setgroups([]), os.setgid(65534), os.setuid(65534)")
    other.open(path)
    assert other.do("store.capabilities.read_only")
    assert all(other.readable(some()))
    assert other.problems() == []
    other.do("store.close()")
    assert kit.tree(path) == before
