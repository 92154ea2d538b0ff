"""The wheel holds every package folder and nothing else, and finds strangers' backends."""

from __future__ import annotations

import configparser
import email
import re
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


def _contents(wheel: Path) -> dict[str, int]:
    """Every file in the wheel and its checksum."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def _difference(tree: Path, wheel: Path) -> set[str]:
    """Returns the files that are in the wheel or in the tree's package folders, but not in both."""
    packed = {name for name in _contents(wheel) if ".dist-info/" not in name}
    on_disk = {
        f"{target}/{path.relative_to(tree / folder).as_posix()}"
        for folder, target in MAPPED.items()
        for path in (tree / folder).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    return packed ^ on_disk


def test_the_wheel_is_what_stands_on_disk(source, wheel):
    assert _difference(source, wheel) == set()
    packed = _contents(wheel)
    assert {"l3store/py.typed", "l3store/abc.py", "l3store/backends/file.py"} <= set(packed)


def test_folders_that_the_package_list_lacks_are_noticed(source, tmp_path):
    """One in the core and one in a mapped folder."""
    copy = shutil.copytree(source, tmp_path / "tree")
    for folder in ("l3store/forgotten", "backends/forgotten"):
        (copy / folder).mkdir()
        (copy / folder / "__init__.py").write_text('"""Not listed."""\n')
    assert _difference(copy, _build(copy, tmp_path, "wheel")) == {
        "l3store/forgotten/__init__.py",
        "l3store/backends/forgotten/__init__.py",
    }


def test_the_wheel_says_what_it_offers(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        points = configparser.ConfigParser(delimiters="=")
        points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert dict(points["console_scripts"]) == {"l3store": "l3store.cli:main"}
    assert dict(points["l3store.backends"]) == {
        "memory": "l3store.backends.memory:MemoryBackend",
        "file": "l3store.backends.file:FileBackend",
        "mooncake": "l3store.backends.mooncake:MooncakeBackend",
        "nvme": "l3store.backends.nvme:NvmeBackend",
        "s3": "l3store.backends.s3:S3Backend",
        "redis": "l3store.backends.redis:RedisBackend",
        "rediss": "l3store.backends.redis:RedisBackend",
        "unix": "l3store.backends.redis:RedisBackend",
    }
    assert dict(points["pytest11"]) == {"l3store": "l3store.testing.plugin"}
    needs = metadata.get_all("Requires-Dist")
    plain = {re.split(r"[^a-z0-9-]", need)[0] for need in needs if "extra ==" not in need}
    assert plain == {"aiofiles", "click", "msgspec", "rich", "xxhash"}
    everything = " ".join(need for need in needs if need.endswith('extra == "all"'))
    assert "engine" in everything
    assert "mooncake" not in everything, "only one of the three can be installed"


def test_the_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    sdist = _build(source, tmp_path, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    again = _build(next((tmp_path / "sdist").iterdir()), tmp_path / "again", "wheel")
    assert _contents(again) == _contents(wheel)


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
