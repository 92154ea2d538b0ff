"""ls, stat and verify over real file stores, damaged behind the store's back."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from l3store import page, registry
from l3store.abc import Capabilities
from l3store.backends.file import FileBackend
from l3store.backends.memory import MemoryBackend
from l3store.cli import main
from l3store.errors import BackendUnavailable
from l3store.inspect import check_store, open_to_look
from l3store.inspect.holes import Chains
from l3store.keys import Chain, Descriptor, PlaceDescriptor, attach
from l3store.testing.kit import Pages

if TYPE_CHECKING:
    from pathlib import Path

PAYLOAD = 1000
TOKENS = 16


def descriptor(**changes: Any) -> Descriptor:
    fields: dict[str, Any] = {
        "model": "Org/Model-7B", "dtype": "bfloat16", "page_size": TOKENS, "pool": "kv",
        "pool_class": "mha", "layers": 2, "heads": 4, "dims": (128,), "page_bytes": PAYLOAD,
    }  # fmt: skip
    return Descriptor(**(fields | changes))


class Store:
    """A file store with a few chains in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, f"file://{root}"
        self.keys: list[str] = []
        with registry.open(self.url) as backend:
            self.namespace = attach(backend, descriptor())
            self.place = f"{self.namespace}/kv/all"
            place = PlaceDescriptor(
                layer_start=0, layer_end=2, head_start=0, head_end=4, segments=(500, 500)
            )
            backend.put_meta(self.place, msgspec.json.encode(place))
        for first in (0, 1000, 2000):
            self.keys += self.add(self.place, first, 6)

    def add(self, place: str, first: int, count: int) -> list[str]:
        chain = Chain.from_tokens(range(first, first + count * TOKENS), TOKENS)
        keys = chain.keys(place)
        payloads = [(memoryview(os.urandom(PAYLOAD)),) for _ in keys]
        with registry.open(self.url) as backend:
            assert backend.page_set(keys, page.seal(place, chain, payloads)) == [True] * count
        return keys

    def path(self, key: str) -> Path:
        place, _, digits = key.rpartition("/")
        return self.root / "pages" / place / digits[:2] / digits

    def everything(self) -> dict[str, tuple[int, bytes]]:
        """Each file with its inode and bytes, each folder."""
        return {
            str(path): (path.lstat().st_ino, path.read_bytes() if path.is_file() else b"")
            for path in self.root.rglob("*")
        }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def run_json(*args: str, code: int = 0) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == code, result.output + result.stderr
    return json.loads(result.stdout)


# -- damage, one kind each -------------------------------------------------------------------


def change(store: Store, key: str, at: int, byte: int | None = None) -> None:
    data = bytearray(store.path(key).read_bytes())
    data[at] = data[at] ^ 0x10 if byte is None else byte
    store.path(key).write_bytes(data)


def resum(data: bytearray) -> bytes:
    """Makes the header's own checksum hold again, as a newer writer would."""
    from xxhash import xxh3_64_intdigest

    data[120:128] = xxh3_64_intdigest(bytes(data[:120])).to_bytes(8, "little")
    return bytes(data)


def flags(store: Store, key: str) -> None:
    data = bytearray(store.path(key).read_bytes())
    data[6] |= 0x80
    store.path(key).write_bytes(resum(data))


def other_key(store: Store, key: str) -> None:
    store.path(key).write_bytes(store.path(store.keys[0]).read_bytes())


def other_place(store: Store, key: str) -> None:
    twin = key.replace("/kv/", "/indexer/")
    store.add(twin.rpartition("/")[0], 2000, 6)
    store.path(key).write_bytes(store.path(twin).read_bytes())


def cut(store: Store, key: str, size: int) -> None:
    os.truncate(store.path(key), size)


def linked(store: Store, key: str) -> None:
    path = store.path(key)
    aside = path.rename(store.root.parent / "aside")
    path.symlink_to(aside)


def foldered(store: Store, key: str) -> None:
    store.path(key).unlink()
    store.path(key).mkdir()


def fifo(store: Store, key: str) -> None:
    store.path(key).unlink()
    os.mkfifo(store.path(key))


DAMAGE = {
    "truncated": lambda store, key: cut(store, key, 100),
    "empty": lambda store, key: cut(store, key, 0),
    "magic": lambda store, key: change(store, key, 0),
    "version": lambda store, key: change(store, key, 4, 9),
    "header": lambda store, key: change(store, key, 100),
    "flags": flags,
    "place": other_place,
    "hash": other_key,
    "length": lambda store, key: cut(store, key, 128 + PAYLOAD - 1),
    "longer": lambda store, key: cut(store, key, 128 + PAYLOAD + 1),
    "payload": lambda store, key: change(store, key, 128 + PAYLOAD - 1),
    "link": linked,
    "folder": foldered,
    "fifo": fifo,
}
REASON = {"empty": "truncated", "longer": "length", "link": "foreign", "folder": "foreign",
          "fifo": "foreign"}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_verify_names_each_kind_of_damage_and_delete_removes_only_that(
    store: Store, kind: str
) -> None:
    key = store.keys[-2]  # one page lies behind it
    DAMAGE[kind](store, key)
    reason = REASON.get(kind, kind)
    before = store.everything()

    seen = run_json("verify", store.url, "--place", store.place, code=1)
    assert seen["bad"] == [{"key": key, "reason": reason}]
    assert seen["reasons"] == {reason: 1}
    assert (seen["pages"], seen["bad_pages"], seen["behind_a_hole"]) == (18, 1, 1)
    assert store.everything() == before, "looking changed the store"

    seen = run_json("verify", store.url, "--delete", code=1)
    assert (seen["bad_pages"], seen["deleted_pages"], seen["not_removed"]) == (1, 1, [])
    after = store.everything()
    del before[str(store.path(key))]
    assert {path: before[path] for path in before} == {path: after[path] for path in before}
    assert not os.path.lexists(store.path(key))

    seen = run_json("verify", store.url)
    assert (seen["bad_pages"], seen["behind_a_hole"]) == (0, 1)


def test_every_reason_has_its_damage() -> None:
    assert set(page.REASONS) <= set(DAMAGE)


def test_verify_of_a_good_store(store: Store) -> None:
    seen = run_json("verify", store.url)
    assert (seen["pages"], seen["bad_pages"], seen["bad"]) == (18, 0, [])
    assert seen["payload_bytes"] == 18 * PAYLOAD
    assert seen["behind_a_hole"] == 0
    result = run("verify", store.url)
    assert result.exit_code == 0
    assert "pages checked" in result.output


def test_verify_prints_bad_keys_and_meanings(store: Store) -> None:
    change(store, store.keys[3], 500)
    result = run("verify", store.url)
    assert result.exit_code == 1
    assert f"bad: {store.keys[3]}: payload" in result.output
    assert page.REASONS["payload"] in result.output


def test_a_folder_with_files_is_named_and_left(store: Store) -> None:
    foldered(store, store.keys[0])
    (store.path(store.keys[0]) / "someone's").write_text("x")
    change(store, store.keys[1], 500)
    seen = run_json("verify", store.url, "--delete", code=1)
    assert (seen["bad_pages"], seen["deleted_pages"]) == (2, 1)
    assert seen["not_removed"][0].startswith(store.keys[0])
    assert (store.path(store.keys[0]) / "someone's").exists()


def test_pages_behind_a_missing_page_count_as_dead_weight(store: Store) -> None:
    store.path(store.keys[2]).unlink()  # of the first chain: 3 pages behind it
    store.path(store.keys[6]).unlink()  # the root of the second: 5 behind it
    seen = run_json("verify", store.url)
    assert seen["behind_a_hole"] == 8


def test_a_pool_that_needs_only_its_last_pages_has_no_holes(store: Store) -> None:
    place = f"{store.namespace}/swa/all"
    keys = store.add(place, 0, 4)
    store.path(keys[0]).unlink()
    seen = run_json("verify", store.url, "--place", place)
    assert seen["places"][0]["behind_a_hole"] is None
    assert seen["behind_a_hole"] == 0


def test_verify_measures_pages_by_themselves_where_their_length_is_forgotten(store: Store) -> None:
    (store.root / "pages" / store.place / "payload_bytes").unlink()
    cut(store, store.keys[0], 128 + PAYLOAD - 1)
    seen = run_json("verify", store.url, code=1)
    assert (seen["pages"], seen["reasons"]) == (18, {"length": 1})


def test_unknown_names_tell_the_nearest(store: Store) -> None:
    wrong = store.namespace[:-1]
    for command in ("ls", "verify"):
        result = run(command, store.url, wrong)
        assert result.exit_code == 2
        assert f"did you mean '{store.namespace}'?" in result.stderr
    result = run("verify", store.url, "--place", store.place + "1")
    assert result.exit_code == 2
    assert f"did you mean '{store.place}'?" in result.stderr


def test_ls_shows_namespaces_with_their_descriptors(store: Store) -> None:
    seen = run_json("ls", store.url)
    [one] = seen["namespaces"]
    assert one["namespace"] == store.namespace
    assert one["descriptor"]["model"] == "Org/Model-7B"
    assert (one["pages"], one["payload_bytes"]) == (18, 18 * PAYLOAD)
    assert one["stored_bytes"] == 18 * (PAYLOAD + 128)
    assert one["places"][0]["descriptor"]["segments"] == [500, 500]
    for args in ((store.url,), (store.url, store.namespace)):
        result = run("ls", *args)
        assert result.exit_code == 0
        assert "Org/Model-7B" in result.output


def test_ls_shows_what_has_no_descriptor_and_what_cannot_be_read(store: Store) -> None:
    store.add("bare/kv/all", 0, 2)
    with registry.open(store.url) as backend:
        backend.put_meta("broken", b"\x00not json")
        backend.put_meta("newer", b'{"schema": 7}')
        attach(backend, descriptor(model="evil\x1b[2J[red]"))
    seen = {one["namespace"]: one for one in run_json("ls", store.url)["namespaces"]}
    assert seen["bare"]["problem"] == "no descriptor"
    assert seen["bare"]["pages"] == 2
    assert "cannot be read" in seen["broken"]["problem"]
    assert "schema 7" in seen["newer"]["problem"]
    result = run("ls", store.url)
    assert result.exit_code == 0
    assert "no descriptor" in result.output
    assert "\x1b" not in result.output
    assert r"evil\x1b[2J[red]" in result.output


def test_ls_passes_over_foreign_files(store: Store) -> None:
    for path in ("README", "pages/notes.txt", "pages/UPPER/kv/all/aa/x", "meta/What?",
                 f"pages/{store.place}/zz", f"pages/{store.place}/aa/short"):  # fmt: skip
        (store.root / path).parent.mkdir(parents=True, exist_ok=True)
        (store.root / path).write_text("foreign")
    (store.root / "meta" / "folder").mkdir()
    (store.root / "pages" / "loop").symlink_to(store.root)
    seen = {one["namespace"]: one for one in run_json("ls", store.url)["namespaces"]}
    assert set(seen) == {store.namespace, "folder"}
    assert seen[store.namespace]["pages"] == 18
    assert "cannot be read" in seen["folder"]["problem"]
    assert run_json("verify", store.url)["pages"] == 18
    assert run_json("stat", store.url)["pages"] == 18


def test_ls_lists_pages_by_their_headers(store: Store) -> None:
    change(store, store.keys[5], 0)
    seen = {one["key"]: one for one in run_json("ls", store.url, "--pages")["pages"]}
    assert set(seen) == set(store.keys)
    assert seen[store.keys[5]]["problem"] == "magic"
    first, second = seen[store.keys[0]], seen[store.keys[1]]
    assert (first["depth"], first["parent"], first["payload_bytes"]) == (0, "", PAYLOAD)
    assert (second["depth"], second["parent"]) == (1, store.keys[0].rpartition("/")[2])
    output = run("ls", store.url, store.namespace, "--pages").output
    assert f"{store.keys[1]}  {PAYLOAD} B  depth 1" in output
    assert f"{store.keys[5]}  magic" in output


def test_stat(store: Store) -> None:
    seen = run_json("stat", store.url)
    assert (seen["health"], seen["pages"], seen["namespaces"]) == ("ok", 18, 1)
    assert seen["capabilities"]["durable"] is True
    assert seen["places"][0]["place"] == store.place
    result = run("stat", store.url)
    assert result.exit_code == 0
    assert store.place in result.output


@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_looking_creates_nothing(command: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    for name in ("missing", "empty", "other"):
        result = run(command, f"file://{tmp_path}/{name}")
        assert result.exit_code == 2
        assert str(tmp_path / name) in result.stderr
    assert not (tmp_path / "missing").exists()
    assert not list((tmp_path / "empty").iterdir())


def test_delete_makes_no_store(tmp_path: Path) -> None:
    assert run("verify", f"file://{tmp_path}/missing", "--delete").exit_code == 2
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_memory_has_nothing_to_look_at(command: str) -> None:
    result = run(command, "memory://")
    assert result.exit_code == 2
    assert "nothing to look at" in result.stderr


def test_delete_needs_the_right_to_write(store: Store) -> None:
    result = run("verify", f"{store.url}?mode=ro", "--delete")
    assert result.exit_code == 2
    assert "right to delete" in result.stderr


# -- stores that keep no file a page ---------------------------------------------------------


class Bare(MemoryBackend):
    """One that cannot read headers alone."""

    capabilities = Capabilities(listing=True, delete=True, interruptible=True)


@pytest.mark.parametrize("kind", [MemoryBackend, Bare])
def test_pages_are_checked_by_calls_and_removed(kind: type[MemoryBackend]) -> None:
    chain = Chain.from_tokens(range(300 * TOKENS), TOKENS)
    keys = chain.keys("ns/kv/all")
    store = kind()
    store.page_set(keys, page.seal("ns/kv/all", chain, [(memoryview(bytes(64)),)] * 300))
    damaged = {keys[10]: "magic", keys[150]: "payload", keys[299]: "hash"}
    pages = store._pages  # behind its back
    pages[keys[10]] = b"X" + pages[keys[10]][1:]
    pages[keys[150]] = pages[keys[150]][:-1] + b"\x01"
    pages[keys[299]] = pages[keys[0]]
    told: list[int] = []
    result = check_store(store, store.usage(), remove_from=store, advance=told.append)
    assert {one.key: one.reason for one in result.bad} == damaged
    assert (result.pages, result.bad_pages, result.deleted_pages) == (300, 3, 3)
    assert result.behind_a_hole == 300 - 10 - 3
    assert sum(told) == 300
    assert sorted(store.scan()) == sorted(set(keys) - set(damaged))


def test_a_page_that_was_replaced_since_it_was_seen_bad_stays(store: Store) -> None:
    key = store.keys[4]
    good = store.path(key).read_bytes()
    change(store, key, 20)

    def writer_is_faster(_: int) -> None:
        store.path(key).write_bytes(good)

    with open_to_look(store.url) as backend, registry.open(store.url, raw=True) as writable:
        result = check_store(
            backend, backend.usage(), remove_from=writable, advance=writer_is_faster
        )
    assert (result.bad_pages, result.deleted_pages) == (1, 0)
    assert store.path(key).read_bytes() == good


def test_holes_of_chains_that_damage_made_round() -> None:
    def header(value: int, parent: int | None) -> page.Header:
        name = value.to_bytes(32, "little")
        return page.Header(
            1, bytes(16), name, None if parent is None else parent.to_bytes(32, "little"), 0, 0, 0
        )

    chains = Chains()
    for value, parent in ((1, 0), (2, 1), (3, 9), (4, 3), (5, 6), (6, 5), (7, None), (8, 7)):
        chains.add(header(value, parent))
    assert chains.behind_a_hole() == 4  # 3 and 4 behind 9, and the circle of 5 and 6


def test_a_wrong_option_of_the_wrappers_is_told_also_where_it_has_no_effect(tmp_path):
    done = CliRunner().invoke(main, ["stat", f"file://{tmp_path}/s?deadline=2sec"])
    assert done.exit_code == 2
    assert "unknown unit 'sec'" in done.stderr


def test_a_page_that_cannot_be_opened_is_one_clear_error(tmp_path):
    pages = Pages()
    with registry.open(f"file://{tmp_path}/s") as store:
        store.page_set(pages.keys, pages.sealed())
    opened = FileBackend.open_page

    def refused(self, key):
        if key == pages.keys[3]:
            raise BackendUnavailable(f"{key}: Permission denied")
        return opened(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileBackend, "open_page", refused)
        done = CliRunner().invoke(main, ["verify", f"file://{tmp_path}/s"])
    assert done.exit_code == 2
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr
