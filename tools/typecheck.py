"""Runs mypy over the unpacked wheel: from the repository it would silently skip the mapped folders.

Exits 1 on an error, and when fewer files were checked than the wheel holds.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Builds, unpacks, checks; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", folder]
        built = subprocess.run([*build, str(ROOT)], capture_output=True, text=True)
        if built.returncode:
            print(built.stdout, built.stderr, sep="")
            return 1
        wheel = next(Path(folder).glob("*.whl"))
        unpacked = Path(folder) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        files = len(list((unpacked / "l3store").rglob("*.py")))
        check = subprocess.run(
            [
                sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"),
                "--cache-dir", str(ROOT / ".mypy_cache"), "-p", "l3store",
            ],
            cwd=unpacked, capture_output=True, text=True,
        )  # fmt: skip
    print(check.stdout, check.stderr, sep="", end="")
    said = re.search(r"(\d+) source files", check.stdout)
    checked = int(said.group(1)) if said else 0
    if checked != files:
        print(f"mypy checked {checked} files, but the wheel holds {files}")
        return 1
    return check.returncode


if __name__ == "__main__":
    sys.exit(main())
