"""Imports point one way, and the core stays free of vendor libraries."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"l3store": "l3store", "backends": "l3store.backends", "adapters": "l3store.adapters"}

# A part may import the parts named here, and all that those may. `errors`, `config`, `metrics`,
# `calls` and `mounts` (what everything may import) may import one another only.
COMMON = {"errors", "config", "metrics", "calls", "mounts"}
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
    "cli": {"replay", "bench", "inspect", "cache", "adapters", "servers"},
    "servers": set(),
    "backends": {"page"},
}

# A list of what is allowed, not of what is forbidden: the next vendor's library has no name yet.
EVERYWHERE = {"msgspec", "xxhash"}
LIBRARIES = {
    "cli": {"click", "rich"},
    "inspect": {"aiofiles"},
    "metrics": {"prometheus_client"},
    "testing": {"hypothesis", "pytest"},
    "cache": {"torch"},
    "consensus": {"torch"},
    "replay": {"torch"},
    "servers": {"mooncake", "redis"},
}
ANY_LIBRARY = {"adapters", "backends"}
# What decides, and what is decided on. Pure: the standard library, errors and one another, no more.
PROTOCOL = {f"l3store.consensus.{name}" for name in ("meeting", "protocol", "values")}


def modules(root: Path) -> dict[str, Path]:
    """Returns every module of the tree at `root` under its import name."""
    found = {}
    for folder, base in SOURCES.items():
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root / folder).with_suffix("").parts
            found[".".join((base, *inner)).removesuffix(".__init__")] = path
    return found


def violations(root: Path) -> list[str]:
    """Returns a line for each import that points the wrong way in the tree at `root`."""
    found = []
    for module, path in modules(root).items():
        part = _part(module)
        if part and part not in MAY and part not in COMMON:
            found.append(f"{module}: {part!r} has no place in the table of imports")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [
            f"{module} imports {name}" for name in sorted(_imported(tree)) if not _may(module, name)
        ]
    return found


def _part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _reach(part: str) -> set[str]:
    found = COMMON | {part}
    for other in MAY.get(part, ()):
        found |= _reach(other)
    return found


def _may(module: str, name: str) -> bool:
    part, top = _part(module), name.split(".")[0]
    if top in sys.stdlib_module_names:
        return True
    if module in PROTOCOL:
        return name.startswith(("l3store.errors", *PROTOCOL))
    if top == "l3store":
        return _part(name) in (_reach(part) if part else ())
    if part in ANY_LIBRARY:
        return top != "torch" or part != "backends"
    return top in EVERYWHERE | LIBRARIES.get(part, set())


def _imported(tree: ast.Module) -> set[str]:
    """Every module that is imported anywhere in the file: in functions, for types only, by name.

    A relative import comes out as ``.name``, which no rule allows: it is not used here.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module="l3store", names=names, level=0):
                found |= {f"l3store.{alias.name}" for alias in names}
            case ast.ImportFrom(module=module, level=level):
                found.add("." * level + (module or ""))
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.add(name)
    return found - {"l3store", "l3store.__version__"}


def test_imports_point_one_way():
    assert violations(ROOT) == []


def test_every_module_was_read():
    """An empty list says nothing when nothing was read."""
    read = set(modules(ROOT))
    assert {"l3store", "l3store.abc", "l3store.wrap.verify", "l3store.backends.file"} <= read
    assert len(read) == sum(1 for folder in SOURCES for _ in (ROOT / folder).rglob("*.py"))


def _plant(root: Path, path: str, code: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True)
    target.write_text(f"from typing import TYPE_CHECKING\n{code}\n")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("l3store/keys/chain.py", "from l3store.page import seal"),
        ("l3store/page.py", "import l3store.registry"),
        ("l3store/page.py", "from l3store import registry"),
        ("l3store/page.py", "from . import registry"),
        ("l3store/page.py", "from .keys import Chain"),
        ("l3store/__init__.py", "from l3store import registry"),
        ("l3store/errors.py", "from l3store.keys import Chain"),
        ("l3store/wrap/verify.py", "from l3store.backends.memory import MemoryBackend"),
        ("l3store/wrap/__init__.py", "import l3store.registry"),
        ("l3store/registry.py", "def f():\n    import l3store.cli"),
        ("l3store/registry.py", "from l3store.backends import memory"),
        ("l3store/registry.py", "import importlib\nimportlib.import_module('l3store.cache')"),
        ("l3store/registry.py", "import boto3"),
        ("l3store/registry.py", "import rich.table"),
        ("l3store/abc.py", "if TYPE_CHECKING:\n    from l3store.keys import Chain"),
        ("l3store/abc.py", "if TYPE_CHECKING:\n    import torch"),
        ("l3store/abc.py", "__import__('torch')"),
        ("l3store/cache/tiers.py", "from l3store.backends.nvme import Ring"),
        ("l3store/cache/tiers.py", "from l3store.cli import main"),
        ("l3store/cache/tiers.py", "import sglang"),
        ("l3store/consensus/reports.py", "import l3store.cache"),
        ("l3store/consensus/reports.py", "import l3store.registry"),
        ("l3store/consensus/protocol.py", "import msgspec"),
        ("l3store/consensus/protocol.py", "import torch"),
        ("l3store/consensus/protocol.py", "from l3store.metrics import METRICS"),
        ("l3store/consensus/protocol.py", "from l3store.consensus.reports import Leader"),
        ("l3store/testing/suite.py", "import l3store.adapters.sglang"),
        ("backends/memory.py", "from l3store.wrap import Verify"),
        ("backends/memory.py", "import l3store.registry"),
        ("backends/memory.py", "import l3store.consensus"),
        ("backends/memory.py", "import torch"),
        ("backends/nvme/io.py", "import l3store.cache.pages"),
        ("adapters/sglang/hicache.py", "import l3store.cli"),
        ("l3store/new.py", "x = 1"),
    ],
)
def test_an_import_the_wrong_way_is_found(tmp_path, path, code):
    _plant(tmp_path, path, code)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("l3store/cli/ls.py", "import rich\nfrom l3store.keys import Chain"),
        ("l3store/cli/new.py", "from l3store.adapters.sglang.launch import Launch"),
        ("l3store/cache/tiers.py", "import torch\nfrom l3store import consensus, errors, registry"),
        ("l3store/consensus/protocol.py", "import enum\nfrom l3store.errors import ConsensusError"),
        ("l3store/replay/engine.py", "from l3store import page, registry"),
        ("l3store/servers/redis.py", "def f():\n    import redis"),
        ("l3store/wrap/__init__.py", "from l3store.wrap.verify import Verify"),
        ("l3store/__init__.py", "import os"),
        ("backends/s3.py", "import boto3\nfrom l3store.page import parse"),
        ("adapters/sglang/hicache.py", "import sglang, torch\nfrom l3store.cache import Tiers"),
    ],
)
def test_an_import_the_right_way_is_not(tmp_path, path, code):
    _plant(tmp_path, path, code)
    assert violations(tmp_path) == []
