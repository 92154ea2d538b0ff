"""The page "Write a backend" does what it says: its code, as it stands, passes the suite."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"


def test_the_code_of_the_page_passes_the_suite(tmp_path):
    module, test = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "sqlite_backend.py").write_text(module)
    (tmp_path / "test_sqlite_backend.py").write_text(test)
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    group, entry = toml.strip().splitlines()
    info = tmp_path / "newcomer-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newcomer\nVersion: 1\n")
    group = re.search(r'"(.+)"', group).group(1)
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry.replace(chr(34), '')}\n")
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
