"""Imports point one way, and the core stays free of vendor libraries."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A part may import the parts named here, and all that those may. `errors`, `config`, `metrics` and
# `calls` (what everything may import) may import one another only.
COMMON = {"errors", "config", "metrics", "calls", "_version"}
MAY = {
    "abc": set(),
    "keys": {"abc"},
    "page": {"keys"},
    "wrap": {"page"},
    "registry": {"wrap"},
    "consensus": set(),
    "cache": {"consensus", "registry"},
    "replay": {"cache"},
    "testing": {"cache"},
    "bench": {"replay"},
    "inspect": {"cache"},
    "adapters": {"cache"},
    "cli": {"replay", "bench", "inspect", "cache"},
    "backends": {"page"},
}
VENDORS = {"boto3", "botocore", "redis", "obstore", "mooncake", "sglang", "pyarrow", "numpy"}
TENSORS_IN = {"cache", "consensus", "adapters", "replay"}


def _reach(part: str) -> set[str]:
    found = set(COMMON)
    for other in MAY[part]:
        found |= {other} | _reach(other)
    return found


def _part(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _imported(tree: ast.Module) -> set[str]:
    """Every module that is imported anywhere in the file, under TYPE_CHECKING, too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            found.add(node.module or "")
            if node.module == "l3store":
                found |= {f"l3store.{alias.name}" for alias in node.names}
    return found - {"l3store", "l3store.__version__"}


def violations(root: Path) -> list[str]:
    """Returns a line for each import that points the wrong way in the tree at `root`."""
    found = []
    for folder, base in (
        ("l3store", "l3store"),
        ("backends", "l3store.backends"),
        ("adapters", "l3store.adapters"),
    ):
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root / folder).with_suffix("").as_posix().replace("/", ".")
            module = f"{base}.{inner}"
            found += _violations_of(module, ast.parse(path.read_text(encoding="utf-8")))
    return found


def _violations_of(module: str, tree: ast.Module) -> list[str]:
    part, found = _part(module), []
    if part == "__init__":
        part = ""
    if part and part not in MAY and part not in COMMON:
        return [f"{module}: {part!r} has no place in the table of imports"]
    allowed = {part} | (_reach(part) if part in MAY else COMMON if part else set())
    for name in sorted(_imported(tree)):
        top = name.split(".")[0]
        if top == "l3store":
            if _part(name) not in allowed:
                found.append(f"{module} imports {name}")
        elif part != "backends" and part != "adapters" and top in VENDORS:
            found.append(f"{module} imports the vendor library {name}")
        elif top == "torch" and part not in TENSORS_IN:
            found.append(f"{module} imports torch")
        elif module == "l3store.consensus.protocol" and top not in sys.stdlib_module_names:
            found.append(f"{module} imports {name}")
    return found


def test_imports_point_one_way():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("l3store/keys/chain.py", "from l3store.page import seal"),
        ("l3store/page.py", "import l3store.registry"),
        ("l3store/page.py", "from l3store import registry"),
        ("l3store/errors.py", "from l3store.keys import Chain"),
        ("l3store/wrap/verify.py", "from l3store.backends.memory import MemoryBackend"),
        ("l3store/registry.py", "def f():\n    import l3store.cli"),
        ("l3store/abc.py", "if TYPE_CHECKING:\n    from l3store.keys import Chain"),
        ("l3store/abc.py", "import torch"),
        ("l3store/registry.py", "import boto3"),
        ("backends/memory.py", "from l3store.wrap import Verify"),
        ("backends/memory.py", "import torch"),
        ("backends/nvme/io.py", "import l3store.cache.pages"),
        ("l3store/consensus/protocol.py", "import msgspec"),
        ("l3store/new.py", "x = 1"),
    ],
)
def test_an_import_the_wrong_way_is_found(tmp_path, path, code):
    target = tmp_path / path
    target.parent.mkdir(parents=True)
    target.write_text(f"from typing import TYPE_CHECKING\n{code}\n")
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("l3store/cli/ls.py", "import rich\nfrom l3store.keys import Chain"),
        ("backends/s3.py", "import boto3\nfrom l3store.page import parse"),
        ("l3store/replay/engine.py", "from l3store import page, registry"),
    ],
)
def test_an_import_the_right_way_is_not(tmp_path, path, code):
    target = tmp_path / path
    target.parent.mkdir(parents=True)
    target.write_text(code + "\n")
    assert violations(tmp_path) == []
