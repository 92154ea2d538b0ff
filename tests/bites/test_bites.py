"""The suite bites: each broken backend fails, and by the promise that it breaks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("broken_list", HERE / "broken.py")
_broken = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_broken)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Runs the suite over all of them in one pytest; returns failures and passes by class."""
    folder = tmp_path_factory.mktemp("inner")
    for name, target in (
        ("inner_suite.py", "test_inner.py"),
        ("inner_conftest.py", "conftest.py"),
        ("broken.py", "broken.py"),
    ):
        (folder / target).write_text((HERE / name).read_text(encoding="utf-8"))
    report = folder / "report.xml"
    command = [
        sys.executable, "-m", "pytest", str(folder), "--rootdir", str(folder), "-q", "--tb=line",
        "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:valkey",
        f"--junitxml={report}", "-W", "ignore",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    failed, passed = Counter(), Counter()
    for case in ET.parse(report).iter("testcase"):
        name = case.get("classname").rpartition(".Test")[2].lower()
        bad = case.find("failure") is not None or case.find("error") is not None
        (failed if bad else passed)[name] += 1
    return failed, passed, done.stdout


@pytest.mark.parametrize("name", _broken.BROKEN)
def test_a_broken_backend_fails_the_promise_it_breaks(outcomes, name):
    failed, passed, _ = outcomes
    assert failed[name], f"{name} passed all {passed[name]} tests of its promise"


def test_the_matrix_names_the_failures(outcomes):
    assert "L3Store backend contract" in outcomes[2]
    assert "FAIL" in outcomes[2]
