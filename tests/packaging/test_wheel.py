"""The wheel holds every package folder and nothing else, and finds strangers' backends."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = {"backends": "l3store/backends", "adapters": "l3store/adapters", "l3store": "l3store"}
NOT_OURS = shutil.ignore_patterns(
    ".git", ".venv*", "*.egg-info", "build", "__pycache__", ".*_cache", ".data", ".hypothesis"
)


def _build(source: Path, out: Path, kind: str) -> Path:
    subprocess.run(
        [sys.executable, "-m", "build", f"--{kind}", "--outdir", str(out), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A clean copy: a stale build folder would bring deleted modules back."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "tree", ignore=NOT_OURS)


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return _build(source, tmp_path_factory.mktemp("wheel"), "wheel")


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def _expected() -> set[str]:
    found = set()
    for folder, target in MAPPED.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix == ".py" or path.name == "py.typed":
                found.add(f"{target}/{path.relative_to(ROOT / folder).as_posix()}")
    return found


def test_the_wheel_is_what_stands_on_disk(wheel):
    assert _names(wheel) == _expected()


def test_a_folder_that_the_package_list_lacks_is_noticed(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "tree", ignore=NOT_OURS)
    (copy / "l3store" / "forgotten").mkdir()
    (copy / "l3store" / "forgotten" / "__init__.py").write_text('"""Not listed."""\n')
    built = _names(_build(copy, tmp_path, "wheel"))
    assert "l3store/forgotten/__init__.py" not in built, "so the test above would fail"


def test_the_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    sdist = _build(source, tmp_path, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    again = _build(next((tmp_path / "sdist").iterdir()), tmp_path / "again", "wheel")
    assert _names(again) == _names(wheel)


STRANGER = """
from l3store.backends.memory import MemoryBackend

class Stranger(MemoryBackend):
    @classmethod
    def from_url(cls, url):
        return cls()
"""


def test_an_installed_strangers_backend_is_found_by_its_entry_point(wheel, tmp_path):
    """The wheel and a fake distribution side by side, without the repository on the path."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "stranger.py").write_text(STRANGER)
    info = site / "stranger-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[l3store.backends]\nfake = stranger:Stranger\nbroken = stranger:Absent\n"
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import l3store; assert l3store.__file__.startswith(sys.argv[1]), l3store.__file__\n"
        "from l3store import registry\n"
        "assert {'fake', 'memory', 'file'} <= set(registry.schemes()), registry.schemes()\n"
        "with registry.open('fake://') as store: print(type(store.inner.inner.inner.inner))\n"
        "try: registry.open('broken://')\n"
        "except registry.ConfigError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(site)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "stranger.Stranger" in done.stdout
    assert "'broken' (stranger:Absent) cannot be loaded" in done.stdout
