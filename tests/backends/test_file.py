"""The file store beyond the contract: opening, permissions, links, foreign files, modes."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from l3store import registry
from l3store.errors import BackendUnavailable, ConfigError
from l3store.testing.kit import PLACE, Pages


def _open(path, **options):
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return registry.open(f"file://{path}?{query}", raw=True)


def _refused(path, match, **options):
    with pytest.raises(ConfigError, match=match):
        _open(path, **options)


def _tree(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


# -- opening --------------------------------------------------------------------------------------


def test_a_folder_that_holds_something_else_is_no_store(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    _refused(tmp_path, r"not a store.*'thesis\.tex'.*empty or new folder")
    assert _tree(tmp_path) == ["thesis.tex"]


def test_a_store_that_lost_its_marker_is_told_what_to_put_back(tmp_path):
    pages = Pages()
    with _open(tmp_path / "s") as store:
        store.page_set(pages.keys, pages.sealed())
    marker = tmp_path / "s" / "store.json"
    marker.unlink()
    with pytest.raises(ConfigError, match=r"looks like a store.*put this into it: \{") as caught:
        _open(tmp_path / "s")
    marker.write_text(str(caught.value).rpartition("put this into it: ")[2])
    with _open(tmp_path / "s") as store:
        assert store.batch_exists(pages.keys) == 8


def test_a_missing_parent_is_named(tmp_path):
    _refused(tmp_path / "a" / "b", "No such file")
    assert _tree(tmp_path) == []


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "store").write_text("x")
    _refused(tmp_path / "store", "cannot be")


def test_a_newer_format_is_refused_with_both_numbers(tmp_path):
    _open(tmp_path / "s").close()
    (tmp_path / "s" / "store.json").write_text('{"format": 7, "kind": "file"}')
    _refused(tmp_path / "s", "format 7; this version reads format 1")


def test_a_store_of_another_kind_names_its_scheme(tmp_path):
    _open(tmp_path / "s").close()
    (tmp_path / "s" / "store.json").write_text('{"format": 1, "kind": "nvme"}')
    _refused(tmp_path / "s", "did you mean nvme://")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "x"}', "\0" * 100])
def test_a_marker_that_cannot_be_read_is_refused(tmp_path, text):
    _open(tmp_path / "s").close()
    (tmp_path / "s" / "store.json").write_text(text)
    _refused(tmp_path / "s", "does not describe a store")


@pytest.mark.parametrize("inner", [False, True])
def test_a_symbolic_link_in_the_path_is_refused_with_the_real_path(tmp_path, inner):
    (tmp_path / "real" / "s").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "last").symlink_to(tmp_path / "real" / "s")
    path = tmp_path / "link" / "s" if inner else tmp_path / "last"
    _refused(path, rf"symbolic link; did you mean '{tmp_path}/real/s'")


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("/tmp/../x", "did you mean '/x'"),
        ("", "no folder of its own"),
        ("/", "no folder of its own"),
    ],
)
def test_a_path_must_be_plain_and_absolute(path, match):
    _refused(path, match)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_no_permission_is_told(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    for parent in tmp_path.parents:
        if parent != Path("/") and parent.stat().st_uid == 0 and parent.name.startswith("pytest"):
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    code = (
        "import os, sys; from l3store import registry; registry.schemes()\n"
        "from l3store.backends import file\n"
        "os.setuid(65534)\n"
        "try: registry.open(sys.argv[1])\n"
        "except registry.ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, f"file://{folder}"], capture_output=True,
                          text=True)  # fmt: skip
    assert "Permission denied" in done.stdout, done.stderr


def test_two_processes_create_one_store_at_once(tmp_path):
    code = (
        "import sys; from l3store import registry\n"
        "sys.stdin.readline(); registry.open(sys.argv[1]).close(); print('good')\n"
    )
    starts = [
        subprocess.Popen([sys.executable, "-c", code, f"file://{tmp_path}/s"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]  # fmt: skip
    for process in starts:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate()[0] for process in starts] == ["good\n"] * 4
    assert _tree(tmp_path / "s") == ["store.json"]


def test_a_store_whose_creation_was_cut_off_is_completed(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "store.json.4711").write_text("{")
    _open(tmp_path / "s").close()
    assert "store.json" in _tree(tmp_path / "s")


def test_two_containers_with_one_process_number_create_one_store(tmp_path, monkeypatch):
    link = os.link

    def other_first(*args, **kwargs):
        monkeypatch.setattr(os, "link", link)
        _open(tmp_path / "s").close()  # the same number, as it is this very process
        link(*args, **kwargs)

    monkeypatch.setattr(os, "link", other_first)
    _open(tmp_path / "s").close()
    assert _tree(tmp_path / "s") == ["store.json"]


def test_a_store_that_another_process_makes_and_uses_meanwhile_is_opened(tmp_path, monkeypatch):
    (tmp_path / "s").mkdir()
    listdir = os.listdir

    def other_first(folder):
        monkeypatch.setattr(os, "listdir", listdir)
        with _open(tmp_path / "s") as other:
            other.put_meta("m-1", b"x")
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", other_first)
    with _open(tmp_path / "s") as store:
        assert store.get_meta("m-1") == b"x"


def test_a_file_system_that_cannot_make_the_marker_is_told(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    _refused(tmp_path / "s", "no links here")
    assert _tree(tmp_path / "s") == []


# -- modes ----------------------------------------------------------------------------------------


def test_read_only_opens_reads_and_changes_nothing(tmp_path):
    pages, more = Pages(), Pages(seed=1)
    with _open(tmp_path / "s") as store:
        store.page_set(pages.keys, pages.sealed())
        store.put_meta("conformance-0", b"x")
    before = _tree(tmp_path)
    with _open(tmp_path / "s", mode="ro") as store:
        assert store.capabilities.read_only
        room = pages.room()
        assert store.page_get(pages.keys, room.pages) == [True] * 8
        assert store.page_set(more.keys, more.sealed()) == [False] * 8
        with pytest.raises(BackendUnavailable, match="read-only"):
            store.put_meta("conformance-0", b"y")
        with pytest.raises(NotImplementedError, match="delete"):
            store.delete(pages.keys)
        store.health()
    assert _tree(tmp_path) == before


def test_read_only_leaves_damage_where_it_is(tmp_path):
    pages = Pages(count=1)
    with _open(tmp_path / "s") as store:
        store.page_set(pages.keys, pages.sealed())
    path = _file(tmp_path / "s", pages.keys[0])
    path.write_bytes(b"damaged")
    with registry.open(f"file://{tmp_path}/s?mode=ro") as store:
        assert store.page_get(pages.keys, pages.room().pages) == [False]
    assert path.read_bytes() == b"damaged"


def test_read_only_does_not_create(tmp_path):
    _refused(tmp_path / "s", "cannot be opened", mode="ro")
    assert _tree(tmp_path) == []


def test_a_read_only_mount_opens_read_only(tmp_path):
    pages = Pages(count=1)
    with _open(tmp_path / "s") as store:
        store.page_set(pages.keys, pages.sealed())
    bind = ["mount", "--bind", str(tmp_path / "s"), str(tmp_path / "s")]
    if subprocess.run(bind, capture_output=True).returncode:
        pytest.skip("mounting is not possible here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(tmp_path / "s")], check=True)
        with _open(tmp_path / "s") as store:
            assert store.page_get(pages.keys, pages.room().pages) == [True]
            assert store.page_set(Pages(seed=1).keys, Pages(seed=1).sealed()) == [False] * 8
    finally:
        subprocess.run(["umount", str(tmp_path / "s")], check=True)


def test_files_are_for_their_owner_only(tmp_path):
    pages = Pages()
    with _open(tmp_path / "s") as store:
        store.page_set(pages.keys, pages.sealed())
        store.put_meta("conformance-0", b"x")
    for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


# -- what strangers leave in a store --------------------------------------------------------------


def _file(root, key):
    place, _, digits = key.rpartition("/")
    return root / "pages" / place / digits[:2] / digits


@pytest.fixture
def filled(tmp_path):
    pages = Pages(count=3)
    with registry.open(f"file://{tmp_path}/s") as store:
        store.page_set(pages.keys, pages.sealed())
        yield store, pages, tmp_path / "s"


def _link(path, outside):
    path.symlink_to(outside)


def _folder(path, outside):
    path.mkdir()


def _fifo(path, outside):
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [_link, _folder, _fifo])
def test_what_is_no_file_in_place_of_a_page_is_a_miss_and_heals(filled, plant):
    store, pages, root = filled
    outside = root.parent / "outside"
    outside.write_bytes(pages.stored(1))
    path = _file(root, pages.keys[1])
    path.unlink()
    plant(path, outside)
    assert store.batch_exists(pages.keys) == 1
    assert store.page_get(pages.keys, pages.room().pages) == [True, False, True]
    assert store.page_set(pages.keys, pages.sealed()) == [True] * 3
    assert store.page_get(pages.keys, pages.room().pages) == [True] * 3
    assert outside.read_bytes() == pages.stored(1)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_linked_folder_does_not_lead_out_of_the_store(tmp_path, depth):
    """Neither reading nor writing follows it; the error names it."""
    pages = Pages(count=1)
    outside = tmp_path / "outside"
    with _open(tmp_path / "s") as store:
        store.page_set(pages.keys, pages.sealed())
    parts = ["pages", *PLACE.split("/"), pages.keys[0].rpartition("/")[2][:2]]
    linked = (tmp_path / "s").joinpath(*parts[: depth + 2])
    linked.rename(outside)
    linked.symlink_to(outside)
    before = _tree(outside)
    with _open(tmp_path / "s") as store:
        other = Pages(count=2, seed=3)
        for call in (
            lambda: store.page_get(pages.keys, pages.room().pages),
            lambda: store.page_set(pages.keys, pages.sealed()),
        ):
            with pytest.raises(BackendUnavailable, match="not a folder of this store"):
                call()
        if depth < 3:
            with pytest.raises(BackendUnavailable, match="not a folder"):
                store.page_set(other.keys, other.sealed())
    assert _tree(outside) == before


def test_foreign_files_are_passed_over(filled):
    store, pages, root = filled
    (root / "pages" / "notes.txt").write_text("x")
    (root / "pages" / PLACE / "zz").mkdir()
    (root / "pages" / PLACE / "zz" / "readme").write_text("x")
    (root / "pages" / "UPPER" / "kv" / "all").mkdir(parents=True)
    (root / "meta").mkdir(exist_ok=True)
    (root / "meta" / "Not A Name").write_text("x")
    assert sorted(store.scan()) == sorted(pages.keys)
    assert [usage.pages for usage in store.usage()] == [3]
    assert store.list_meta() == []


def test_a_damaged_length_file_is_named(tmp_path):
    pages = Pages(count=1)
    with _open(tmp_path / "s") as store:
        store.page_set(pages.keys, pages.sealed())
    (tmp_path / "s" / "pages" / PLACE / "payload_bytes").write_text("many")
    with _open(tmp_path / "s") as store, pytest.raises(BackendUnavailable, match="payload_bytes"):
        store.page_get(pages.keys, pages.room().pages)


def test_temporary_files_of_the_killed_are_swept_once_they_are_old(tmp_path):
    _open(tmp_path / "s").close()
    (tmp_path / "s" / "tmp").mkdir()
    for name, age in (("old", 7200), ("new", 10)):
        path = tmp_path / "s" / "tmp" / name
        path.write_bytes(b"x")
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    _open(tmp_path / "s").close()
    assert _tree(tmp_path / "s" / "tmp") == ["new"]


def test_what_cannot_be_swept_keeps_nobody_from_opening(tmp_path):
    _open(tmp_path / "s").close()
    folder = tmp_path / "s" / "tmp" / "folder"
    folder.mkdir(parents=True)
    (folder / "full").write_bytes(b"x")
    os.utime(folder, (1, 1))
    with _open(tmp_path / "s") as store:
        store.health()


@pytest.mark.parametrize("top", ["pages", "meta"])
def test_a_store_without_its_folders_is_not_called_empty(tmp_path, top):
    pages = Pages(count=1)
    with _open(tmp_path / "s") as store:
        store.page_set(pages.keys, pages.sealed())
        store.put_meta("m-1", b"x")
        (tmp_path / "s" / top).rename(tmp_path / "away")
        (tmp_path / "s" / top).write_bytes(b"")
        for call in (store.scan, store.usage) if top == "pages" else (store.list_meta,):
            with pytest.raises(BackendUnavailable, match=f"{top} is not a folder"):
                list(call())


def test_workers_must_be_positive(tmp_path):
    _refused(tmp_path / "s", "'workers'", workers=0)


def test_small_files_are_synced_before_they_get_their_name_and_pages_are_not(tmp_path, monkeypatch):
    events = []

    def watch(name):
        real = getattr(os, name)

        def watched(*args, **kinds):
            real(*args, **kinds)
            events.append((name, str(args[-1])))

        monkeypatch.setattr(os, name, watched)

    for name in ("fsync", "rename", "link"):
        watch(name)
    pages = Pages(count=1)
    with _open(tmp_path / "s") as store:
        store.put_meta("conformance-0", b"x")
        store.page_set(pages.keys, pages.sealed())
    kinds = [name for name, _ in events]
    names_of_the_store = ["fsync", "fsync"]  # its folder and the one it stands in
    assert kinds == [
        "fsync", "link", *names_of_the_store, "fsync", "rename", "fsync", "link", "rename"
    ]  # fmt: skip
    assert events[1][1] == "store.json"
    assert events[5][1] == "meta/conformance-0"
    assert events[7][1].endswith("payload_bytes")
