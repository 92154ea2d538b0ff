"""The suite bites: each broken backend fails, and by the promise that it breaks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONFORMANCE = HERE.parent / "conformance"
FILES = {
    "test_inner.py": HERE / "inner_suite.py",
    "conftest.py": HERE / "inner_conftest.py",
    "broken.py": HERE / "broken.py",
    "over_file.py": CONFORMANCE / "test_file.py",
    "over_memory.py": CONFORMANCE / "test_memory.py",
}
_spec = importlib.util.spec_from_file_location("broken_list", HERE / "broken.py")
_broken = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_broken)


pytestmark = pytest.mark.timeout(600)  # one run over all of them, on a machine that may be busy


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Runs the suite over all of them in one pytest; returns failures and passes by class."""
    folder = tmp_path_factory.mktemp("inner")
    for name, source in FILES.items():
        (folder / name).write_text(source.read_text(encoding="utf-8"))
    _install(folder)
    report = folder / "report.xml"
    command = [
        sys.executable, "-m", "pytest", str(folder), "--rootdir", str(folder), "-q", "--tb=line",
        "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:valkey",
        f"--junitxml={report}", "-W", "ignore",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(folder)}
    for name in ("CI", "BUILD_NUMBER"):  # with them pytest prints whole differences of pages
        environment.pop(name, None)
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    failed, passed = Counter(), Counter()
    for case in ET.parse(report).iter("testcase"):
        name = case.get("classname").rpartition(".Test")[2].lower()
        if case.find("failure") is not None or case.find("error") is not None:
            failed[name] += 1
        elif case.find("skipped") is None:
            passed[name] += 1
    return failed, passed, done.stdout


def _install(folder):
    """Makes the backends known by entry point, as an installed package would: to all processes."""
    info = folder / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    kinds = _broken.BROKEN | _broken.HEALTHY
    lines = [f"{scheme} = broken:{kind.__name__}" for scheme, kind in kinds.items()]
    (info / "entry_points.txt").write_text("\n".join(["[l3store.backends]", *lines]) + "\n")


@pytest.mark.parametrize("name", _broken.BROKEN)
def test_a_broken_backend_fails_the_promise_it_breaks(outcomes, name):
    failed, passed, _ = outcomes
    assert failed[name], f"{name} passed all {passed[name]} tests of its promise"


@pytest.mark.parametrize("name", _broken.HEALTHY)
def test_a_healthy_backend_passes_all_of_it(outcomes, name):
    failed, passed, said = outcomes
    why = [line for line in said.splitlines() if line.startswith("FAILED") and name in line.lower()]
    assert not failed[name], why
    assert passed[name]


def test_the_matrix_names_the_failures(outcomes):
    assert "L3Store backend contract" in outcomes[2]
    assert "FAIL" in outcomes[2]
