"""l3store bench: its figures are of bytes that were moved, and it says where they came from."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from l3store import registry
from l3store.abc import Capabilities
from l3store.backends.memory import MemoryBackend, MemoryOptions
from l3store.bench import Plan, bench
from l3store.bench.medium import Medium, cold_or_warm
from l3store.bench.plan import check_plan
from l3store.cli import main
from l3store.config import Size, StoreURL
from l3store.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from l3store.abc import Check, Segments

SMALL = Plan(page_bytes=(4096, 6000), segments=(1, 4), batch=16, rounds=2, working_set=400_000)
MEMORY = StoreURL.parse("memory://")


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l3store.bench.engine.pool_bytes", lambda: 100_000)


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["bench", *args])


def run_small(*args: str, code: int = 0) -> Any:
    sizes = ("--page-bytes", "4KiB", "--batch", "16", "--working-set", "1MiB", "--rounds", "2")
    result = run(*sizes, *args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


# -- figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [True, False])
def test_rows_and_what_they_are_made_of(raw: bool, tmp_path: Path) -> None:
    for url in ("memory://", f"file://{tmp_path}/store"):
        told: list[int] = []
        with registry.open(url, raw=raw) as backend:
            result = bench(backend, SMALL, StoreURL.parse(url), raw=raw, advance=told.append)
            assert backend.usage() == [], "pages were left"
        shape = [(row.page_bytes, row.segments, row.op) for row in result.rows]
        assert shape == [
            (size, count, op)
            for size in (4096, 6000) for count in (1, 4) for op in ("set", "get", "exists")
        ]  # fmt: skip
        assert {row.pages for row in result.rows} == {96, 64}  # whole batches
        assert sum(told) == sum(2 * row.pages for row in result.rows)
        for row in result.rows:
            assert (row.missed_pages, row.mismatched_pages) == (0, 0)
            assert 0 < row.p50_ms <= row.p95_ms <= row.p99_ms
            assert row.pages_s > 0
            if row.op == "exists":
                assert row.gb_s is row.of_memcpy is None
                continue
            assert row.gb_s is not None
            assert row.gb_s_lowest is not None
            assert row.gb_s_highest is not None
            assert row.memcpy_gb_s is not None
            assert row.gb_s_lowest <= row.gb_s <= row.gb_s_highest
            assert row.gb_s * 1e9 == pytest.approx(row.pages_s * row.page_bytes)
        assert result.verify is not raw
        assert result.notes == []


def test_other_pages_of_the_store_stay() -> None:
    store = MemoryBackend()
    keys = [f"mine/kv/all/{i:064x}" for i in range(5)]
    pages = [(memoryview(bytes(128)), memoryview(b"payload"))] * 5
    store.page_set(keys, pages)
    bench(store, SMALL, MEMORY, raw=True)
    assert sorted(store.scan()) == keys


def test_pages_are_removed_when_the_store_fails_in_between() -> None:
    class Failing(MemoryBackend):
        def batch_exists(self, keys: Sequence[str]) -> int:
            raise BackendUnavailable("gone")

    store = Failing()
    with pytest.raises(BackendUnavailable):
        bench(store, SMALL, MEMORY, raw=True)
    assert list(store.scan()) == []


def test_a_store_that_cannot_delete_is_told_about() -> None:
    class Keeping(MemoryBackend):
        capabilities = Capabilities(listing=True, interruptible=True)

    store = Keeping()
    plan = Plan(page_bytes=(4096,), segments=(1,), batch=16, rounds=2, working_set=400_000)
    result = bench(store, plan, MEMORY, raw=True)
    assert result.notes == [
        f"{16 + 2 * 96} pages stay in l3store-bench/b4096/all: this store cannot delete"
    ]
    assert len(list(store.scan())) == 16 + 2 * 96


def test_shuffled_reads_come_in_another_order() -> None:
    class Recording(MemoryBackend):
        def __init__(self) -> None:
            super().__init__()
            self.was_set: list[str] = []
            self.was_read: list[str] = []

        def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:
            self.was_set += keys
            return super().page_set(keys, pages)

        def page_get(
            self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
        ) -> list[bool]:
            self.was_read += keys
            return super().page_get(keys, into, check)

    plan = Plan(page_bytes=(4096,), segments=(1,), batch=16, rounds=1, working_set=400_000)
    straight, mixed = Recording(), Recording()
    bench(straight, plan, MEMORY, raw=True)
    assert straight.was_read == straight.was_set
    result = bench(mixed, Plan(**{**_fields(plan), "shuffle": True}), MEMORY, raw=True)
    assert mixed.was_read != mixed.was_set
    assert sorted(mixed.was_read) == sorted(mixed.was_set)
    assert [row.mismatched_pages for row in result.rows] == [0, 0, 0]


def _fields(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


# -- wrong bytes are seen --------------------------------------------------------------------


def test_every_byte_is_compared() -> None:
    class LastByte(MemoryBackend):
        def page_get(
            self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
        ) -> list[bool]:
            done = super().page_get(keys, into, check)
            into[0][-1][-1] ^= 1
            return done

    result = bench(LastByte(), SMALL, MEMORY, raw=True)
    wrong = {row.mismatched_pages for row in result.rows if row.op == "get"}
    assert wrong == {2 * 96 // 16, 2 * 64 // 16}  # one a call
    assert sum(note.startswith("WRONG BYTES") for note in result.notes) == 4


def test_a_read_that_fills_nothing_is_wrong_though_the_buffer_once_held_the_page() -> None:
    class Lying(MemoryBackend):
        def page_get(
            self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
        ) -> list[bool]:
            return [True] * len(keys)

    plan = Plan(page_bytes=(4096,), segments=(1,), batch=16, rounds=1, working_set=65_536)
    result = bench(Lying(), plan, MEMORY, raw=True)
    assert [row.mismatched_pages for row in result.rows if row.op == "get"] == [16]


def test_a_store_that_is_too_small_says_missed() -> None:
    store = MemoryBackend(MemoryOptions(capacity=Size(200_000)))
    result = bench(store, SMALL, MEMORY, raw=True)
    assert any(note.startswith("MISSED: get") for note in result.notes)


def test_wrong_bytes_end_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: MemoryBackend, data: bytes | None, *_: Any) -> bool:
        return data is not None

    monkeypatch.setattr(
        MemoryBackend, "page_get", lambda self, keys, into, check=None: [True] * len(keys)
    )
    seen = run_small("memory://", "--raw", code=1)
    assert [row["mismatched_pages"] > 0 for row in seen["rows"] if row["op"] == "get"] == [True] * 3


# -- where the bytes came from ---------------------------------------------------------------


def kernel_counts_reads_below(folder: Path) -> bool:
    """Asks the kernel, not the code under test: does a cold read of a file here get counted?"""

    def counted() -> int:
        with open("/proc/self/io", encoding="ascii") as lines:
            return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])

    path = folder / "probe"
    path.write_bytes(os.urandom(1 << 20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = counted()
        file.read()
        return counted() - before >= 1 << 20


def in_ram(folder: Path) -> bool:
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True,
                          check=True)  # fmt: skip
    return kind.stdout.strip() in ("tmpfs", "ramfs")


def gets(seen: Any) -> list[Any]:
    return [row for row in seen["rows"] if row["op"] == "get"]


def test_cold_and_warm_are_proven_by_bytes_from_the_device(tmp_path: Path) -> None:
    if in_ram(tmp_path) or not kernel_counts_reads_below(tmp_path):
        pytest.skip("no disk below the temporary folder whose reads the kernel counts")
    url = f"file://{tmp_path}/store"
    cold, warm = (run_small(url, "--cache", state) for state in ("cold", "warm"))
    for row in gets(cold):
        assert row["cache"] == "cold"
        assert row["device_bytes"] >= 2 * row["pages"] * row["page_bytes"]
    for row in gets(warm):
        assert row["cache"] == "warm"
        assert row["device_bytes"] == 0
    assert cold["notes"] == warm["notes"] == []


def test_cold_that_was_asked_and_not_reached_is_said_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Medium, "drop", lambda self, namespace: None)  # pages stay in the cache
    seen = run_small(f"file://{tmp_path}/store", "--cache", "cold")
    assert all(row["cache"] in ("warm", "ram") for row in gets(seen))
    assert len(seen["notes"]) == 3
    assert all(note.startswith("NOT COLD: get of 4096 bytes") for note in seen["notes"])


def test_a_store_in_memory_is_ram_and_never_cold() -> None:
    seen = run_small("memory://", "--cache", "cold")
    assert {row["cache"] for row in seen["rows"]} == {"ram"}
    assert {row["device_bytes"] for row in gets(seen)} == {0}
    assert seen["notes"][0].startswith("NOT COLD")


def test_a_file_system_in_memory_is_found_out() -> None:
    shm = "/dev/shm"
    if not os.path.isdir(shm):
        pytest.skip("no /dev/shm")
    with subprocess.Popen(["stat", "-f", "-c", "%T", shm], stdout=subprocess.PIPE) as stat:
        assert stat.stdout is not None
        kind = stat.stdout.read().decode().strip()
    medium = Medium.of(StoreURL.parse(f"file://{shm}"), Capabilities(durable=True, shared=True))
    assert (medium.kind == "ram") == (kind == "tmpfs")


def test_a_server_is_remote() -> None:
    able = Capabilities(shared=True, durable=True)
    assert Medium.of(StoreURL.parse("redis://host:6379/0"), able).kind == "remote"


def test_what_device_bytes_prove() -> None:
    proofs = [(100, "cold"), (96, "cold"), (94, "mixed"), (2, "mixed"), (1, "warm"), (0, "warm"),
              (None, "unknown")]  # fmt: skip
    assert [(moved, cold_or_warm(moved, 100)) for moved, _ in proofs] == proofs


# -- bad sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (("--page-bytes", "64kib"), "did you mean 'KiB'?"),
        (("--page-bytes", "0"), "not positive"),
        (("--op", "gett"), "'get'"),
        (("--segments", "0"), "0 is not in the range"),
        (("--page-bytes", "4KiB", "--segments", "63"), "nearest number that can is 64"),
        (("--page-bytes", "100", "--segments", "7"), "nearest number that can is 5"),
        (("--page-bytes", "1MiB", "--working-set", "8MiB"), "largest batch is 8"),
        (("--page-bytes", "1MiB", "--working-set", "1MiB"), "least working set is 134217728"),
        (("--cache", "hot"), "'cold', 'warm', 'any'"),
    ],
)
def test_bad_sizes_name_the_nearest_valid_one(args: tuple[str, ...], names: str) -> None:
    result = run("memory://", *args)
    assert result.exit_code == 2
    assert names in result.stderr


def test_limits_of_the_store_are_kept() -> None:
    class Limited(MemoryBackend):
        capabilities = Capabilities(
            listing=True, delete=True, interruptible=True, max_batch=8, max_page_bytes=5000
        )

    with pytest.raises(ConfigError, match="takes 1 to 8 pages a call"):
        bench(Limited(), SMALL, MEMORY, raw=True)
    plan = Plan(page_bytes=(4096, 6000), segments=(1,), batch=8, working_set=400_000)
    with pytest.raises(ConfigError, match="the largest is 4872"):
        bench(Limited(), plan, MEMORY, raw=True)


def test_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    result = run(url, "--page-bytes", "1MiB", "--working-set", "1000TiB")
    assert result.exit_code == 2
    assert "the largest that does is" in result.stderr
    result = run("memory://", "--page-bytes", "1MiB", "--working-set", "1000TiB")
    assert result.exit_code == 2
    assert "bytes of memory" in result.stderr
    with registry.open(url) as backend:
        assert backend.usage() == []


def test_the_table_states_segments_cache_and_verify() -> None:
    sizes = ("--page-bytes", "4KiB", "--batch", "16", "--working-set", "1MiB", "--rounds", "1")
    for args, verify in (((), "verify on"), (("--raw",), "verify off")):
        result = run("memory://", *sizes, *args, "--cache", "warm")
        assert result.exit_code == 0
        for text in (verify, "cache asked: warm", "segments", "memcpy", "warm-up", "device"):
            assert text in result.stdout
        assert "NOT WARM" in result.stderr


def test_a_store_that_takes_nothing_has_no_speed(tmp_path: Path) -> None:
    registry.open(f"file://{tmp_path}/s").close()
    done = run(f"file://{tmp_path}/s?mode=ro", "--working-set", "16MiB", "--page-bytes", "64KiB")
    assert done.exit_code == 2
    assert "took none of 128 pages" in done.stderr


def test_what_a_store_that_cannot_delete_would_keep_is_bounded() -> None:
    plan = Plan(working_set=1 << 30, rounds=3)
    able = Capabilities(delete=False)
    with pytest.raises(ConfigError, match=r"cannot delete.*--working-set"):
        check_plan(plan, able, Medium.of(StoreURL.parse("memory://"), able), pools=0)
