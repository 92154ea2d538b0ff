"""bench/common: what the benchmarks say of what they measured."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from types import ModuleType

COMMON = Path(__file__).resolve().parents[2] / "bench" / "common"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports a module of the scripts, which are no package, for one test."""
    monkeypatch.syspath_prepend(str(COMMON))
    for path in COMMON.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module(name)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    for path in COMMON.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("figures", monkeypatch)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("disk", monkeypatch)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("report", monkeypatch)


# -- figures ---------------------------------------------------------------------------------


def pairs_of(figures: ModuleType, ours: list[float], other: list[float]) -> Any:
    def halves(walls: list[float]) -> list[Any]:
        return [figures.Half(wall, wall / 10) for wall in walls]

    return figures.Pairs(10**9, halves(ours), halves(other))


def test_a_speed_is_theirs_by_ours_and_a_time_ours_by_theirs(figures: ModuleType) -> None:
    pairs = pairs_of(figures, [0.1, 0.1, 0.5], [0.2, 0.4, 0.5])
    speed = figures.Figure.speeds("x", pairs, "file", least=2.5)
    assert (speed.ours, speed.other, speed.ratio) == (10, 2.5, 2)
    assert not speed.reached
    time = figures.Figure.times("x", pairs, "file", most=0.5)
    assert (time.ours, time.other, time.unit) == (100, 400, "ms")
    assert (time.low, time.ratio, time.high) == (0.25, 0.5, 1)
    assert time.reached
    assert not figures.Figure.times("x", pairs, "file", most=0.49).reached


def test_a_goal_is_judged_by_the_median_and_the_spread_leaves_out_a_tenth(
    figures: ModuleType,
) -> None:
    walls = [float(i) for i in range(1, 21)]
    figure = figures.Figure.times("x", pairs_of(figures, walls, [10.0] * 20), "file")
    assert figure.ratio == pytest.approx(1.05)
    assert (figure.low, figure.high) == pytest.approx((0.3, 1.8))
    assert "-" in figure.line()
    assert figure.as_json()["ok"] is None


def test_cpu_is_the_ratio_of_the_sums(figures: ModuleType) -> None:
    pairs = pairs_of(figures, [1.0, 3.0], [1.0, 7.0])
    figure = figures.Figure.cpus("x", pairs, "file", [figures.at_most(0.5, 0.25)])
    assert (figure.ours, figure.other) == pytest.approx((0.2, 0.4))
    assert figure.ratio == pytest.approx(0.5)
    assert (figure.low, figure.high) == pytest.approx((3 / 7, 1))
    assert figure.line().split()[-1] == "MISSED"


def test_each_side_goes_first_in_turn(figures: ModuleType) -> None:
    order: list[str] = []

    def half(name: str) -> Any:
        order.append(name)
        return figures.Half(1.0, 1.0)

    pairs = figures.Pairs(1)
    figures.paired(3, lambda i: half(f"a{i}"), lambda i: half(f"b{i}"), pairs)
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert len(pairs.ours) == len(pairs.other) == 3


# -- disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "wanted", "said"),
    [
        (100, "device", "100% from the device"),
        (94, "device", "NOT COLD: 94% from the device"),
        (1, "cache", "1% from the device"),
        (2, "cache", "NOT WARM: 2% from the device"),
        (200, "device", "200% from the device"),
    ],
)
def test_a_proof_is_loud_when_it_is_none(
    disk: ModuleType, read: int, wanted: str, said: str
) -> None:
    moved = disk.Moved()
    moved.payload, moved.read = 100, read
    assert moved.proof(wanted) == said


def test_moved_counts_what_comes_from_the_device_and_drop_makes_it_come(
    disk: ModuleType, tmp_path: Path
) -> None:
    if disk.file_system(str(tmp_path)) in ("tmpfs", "ramfs"):
        pytest.skip("the temporary folder lies in memory")
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(os.urandom(1 << 20))
    files, moved = disk.Files(str(tmp_path)), disk.Moved()

    def read() -> str:
        moved.reset()
        moved.start()
        path.read_bytes()
        moved.stop(1 << 20)
        return moved.proof("device")

    files.sync()
    assert read() == "NOT COLD: 0% from the device"
    files.drop()
    assert read() == "100% from the device"


def test_sync_looks_at_new_files_only(
    disk: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(disk, "_sync", lambda path, drop: synced.append(Path(path).name))
    files = disk.Files(str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        files.sync()
    assert synced == ["a", "b"]
    files.forget()
    files.sync()
    assert sorted(synced[2:]) == ["a", "b"]


# -- the command line --------------------------------------------------------------------------


def parsed(report: ModuleType, monkeypatch: pytest.MonkeyPatch, *given: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["bench", *given])
    found: argparse.Namespace = report.checked(
        report.arguments("x", "Words.", ("read", "write")), ("read", "write"), 0.001
    )
    return found


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["raed"], "unknown figure 'raed'; did you mean 'read'?"),
        (["--pairs", "0"], "--pairs 0: at least 1"),
        (["--dir", "/no/such"], "--dir /no/such: no such folder"),
        (["--dir", "/dev/shm"], "--dir /dev/shm lies in memory: name a folder on a disk"),
    ],
)
def test_what_is_wrong_is_named(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    given: list[str], why: str,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        parsed(report, monkeypatch, *given)
    assert why in capsys.readouterr().err


def test_a_folder_without_room_is_refused(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(report, "file_system", lambda path: "ext4")
    monkeypatch.setattr(report, "free_bytes", lambda path: 400_000_000)
    with pytest.raises(SystemExit):
        parsed(report, monkeypatch, "--dir", str(tmp_path))
    assert "has 0.4 GB free of 0.001" in capsys.readouterr().err
    monkeypatch.setattr(report, "free_bytes", lambda path: 600_000_000)
    given = parsed(report, monkeypatch, "--dir", str(tmp_path), "write", "--quick")
    assert (given.figures, given.quick, given.pairs) == (["write"], True, None)


def test_show_prints_each_figure_and_counts_goals(
    report: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = sys.modules["figures"]
    found = [
        figures.Figure("good", "s", 1.0, goals=(figures.at_most(1.0, 2),)),
        figures.Figure("bad", "s", 3.0, goals=(figures.at_most(3.0, 2),)),
        figures.Figure("neither", "s", 3.0),
    ]
    report.show({"who": "we"}, {"all": lambda: iter(found)}, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "who: we"
    assert [line.split()[0] for line in lines[3:6]] == ["good", "bad", "neither"]
    assert lines[-1] == "1 of 2 goals reached"
    report.show({"who": "we"}, {"all": lambda: iter(found)}, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["who"] == "we"
    assert [one["ok"] for one in told["figures"]] == [True, False, None]


def test_the_folder_of_a_run_is_gone_at_its_end(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # not in the process of all tests
    with report.folder_of_run(str(tmp_path)) as folder:
        Path(folder, "file").write_text("x")
        assert Path(folder).parent == tmp_path
    assert list(tmp_path.iterdir()) == []
