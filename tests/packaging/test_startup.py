"""What starts must start fast: no heavy library comes with the import or with help."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "rich", "aiofiles", "pytest", "hypothesis", "prometheus_client")
SCRIPT = Path(sys.executable).with_name("l3store")


@pytest.fixture
def stand_ins(tmp_path) -> dict[str, str]:
    """An environment where all of HEAVY can be imported: what is not installed is not missed."""
    for name in HEAVY:
        (tmp_path / f"{name}.py").write_text("")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def _loaded(code: str, env: dict[str, str]) -> list[str]:
    code += f"\nimport sys; print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [name.strip(" '") for name in done.stderr.strip("[]\n").split(",") if name]


@pytest.mark.parametrize(
    "code",
    [
        "import l3store",
        "from l3store import abc, keys, page, registry; registry.schemes()",
        "from l3store.cli import main; main(['--help'], standalone_mode=False)",
    ],
)
def test_nothing_heavy_is_loaded(code, stand_ins):
    assert _loaded(code, stand_ins) == []


@pytest.mark.parametrize("name", HEAVY)
def test_what_is_heavy_is_noticed(name, stand_ins):
    guarded = f"try:\n    import {name}\nexcept ImportError:\n    pass"
    assert _loaded(guarded, stand_ins) == [name]


def test_help_tells_the_commands(capsys):
    """The time is shown and not judged: a busy machine is no defect."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start)
        assert "replay" in done.stdout
    with capsys.disabled():
        print(f"\nl3store --help: {min(times) * 1e3:.0f} ms, the best of 3")
