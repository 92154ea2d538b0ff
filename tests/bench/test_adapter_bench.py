"""bench/sglang_file and bench/adapter_cost.py, in sglang's own environment: what they let pass."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of `_in_sglang.py` for all tests: importing sglang takes seconds."""
    if not PYTHON.exists():
        missing = f"{PYTHON} is not there: run `make .venv-sglang/installed`"
        if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("adapter")
    run = subprocess.run(
        [PYTHON, Path(__file__).with_name("_in_sglang.py"), folder],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def test_each_geometry_has_all_its_lines(seen: dict[str, Any]) -> None:
    for shape in ("128 KiB MLA page_first, 1 segm.", "64 KiB MHA layer_first, 16 segm."):
        at = [one["what"] for one in seen["figures"]].index(f"read, cold, v1, {shape}")
        assert [one["what"] for one in seen["figures"][at : at + 10]] == [
            f"read, cold, v1, {shape}", "  CPU",
            f"write, v1, {shape}", "  CPU",
            f"read, cold, generic, {shape}", "  CPU", "  CPU, sglang's own part of it",
            f"write, generic, {shape}", "  CPU",
            f"batch_exists of 128 keys, {shape}",
        ]  # fmt: skip


def test_only_reads_of_128_kib_are_judged(seen: dict[str, Any]) -> None:
    judged = [(at, one["goals"]) for at, one in enumerate(seen["figures"]) if one["goals"]]
    assert judged == [(0, ["<= 0.65"]), (1, ["<= 0.25"]), (4, ["<= 0.65"])]
    for at, _ in judged:
        one = seen["figures"][at]
        assert one["ok"] is (one["ratio"] <= float(one["goals"][0][3:]))


def test_a_ratio_is_ours_by_the_other(seen: dict[str, Any]) -> None:
    for one in seen["figures"]:
        assert one["ours"] > 0
        assert one["other"] > 0
        if one["unit"] == "CPU s/GB":
            assert one["ratio"] == pytest.approx(one["ours"] / one["other"])
        else:
            assert one["low"] <= one["ratio"] <= one["high"]


def test_nothing_is_left(seen: dict[str, Any]) -> None:
    assert seen["left"] == []


def test_reads_are_cold_only_when_they_were_dropped(seen: dict[str, Any]) -> None:
    assert seen["refusals"]["dropped"].endswith("from the device")
    assert not seen["refusals"]["dropped"].startswith("NOT")
    assert seen["refusals"]["not dropped"] == "NOT COLD: 0% from the device"
    for one in seen["figures"]:
        assert "NOT" not in one["note"]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("all well", ""),
        ("a flipped bit", "sglang's file gave 128 of 128 pages back, 1 with a wrong byte"),
        ("a page less", "sglang's file gave 5 of 128 pages back, 123 with a wrong byte"),
        ("a lookup less", "sglang's file knows 5 of 128 pages that it stored"),
        ("a flipped bit of ours", "ours, v1, gave 7 of 128 pages back, 1 with a wrong byte"),
        ("nothing came", "nothing gave 128 of 128 pages back, 128 with a wrong byte"),
        ("nothing went", "nothing did not store batch 0"),
    ],
)
def test_a_run_ends_where_a_byte_is_wrong(seen: dict[str, Any], what: str, why: str) -> None:
    assert seen["refusals"][what] == why


def test_the_adapters_own_cost_is_judged_by_page_and_by_further_segment(
    seen: dict[str, Any],
) -> None:
    goals = {one["what"]: one["goal"] for one in seen["costs"]["figures"]}
    for op in ("get", "set"):
        assert goals[f"batch_{op}_v1, 1 segments"] == goals[f"batch_{op}_v1, 2 segments"] == 2.5
        assert goals[f"batch_{op}_v1, 16 segments"] is None
    further = [one for one in seen["costs"]["figures"] if one["unit"] == "us a segment"]
    assert [one["goal"] for one in further] == [0.2, 0.2]
    assert {one["values"] for one in seen["costs"]["figures"]} == {2}


def test_a_call_that_fails_is_no_figure(seen: dict[str, Any]) -> None:
    assert seen["costs"]["refused"] == "batch_get_v1 did not reach the store that does nothing"
