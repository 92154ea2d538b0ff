"""The page "Write a backend" does what it says: its code, as it stands, passes the suite."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"


def test_the_code_of_the_page_passes_the_suite(tmp_path):
    module, test = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "sqlite_backend.py").write_text(module)
    (tmp_path / "test_sqlite_backend.py").write_text(test)
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    project = tomllib.loads(toml)
    (group, entries), *more = project["project"]["entry-points"].items()
    assert not more
    info = tmp_path / "newcomer-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newcomer\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    assert project["tool"]["setuptools"]["py-modules"] == ["sqlite_backend"]
    command = [
        sys.executable, "-m", "pytest", "test_sqlite_backend.py", "-q", "--rootdir", ".",
        "-p", "no:cacheprovider", "-p", "no:valkey",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert "pass" in done.stdout
    assert "FAIL" not in done.stdout
