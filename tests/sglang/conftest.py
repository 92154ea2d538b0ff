"""What the tests against the real engine share, and what the engine's absence means."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# A model that is not on this machine is an error at once, not after minutes of retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ABSENT = "sglang is not installed here: run `make .venv-sglang/installed`, " + (
    "then `.venv-sglang/bin/pytest tests/sglang`"
)


class _NotHere(pytest.Module):
    """A test file that is not imported, because what it tests against is absent."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
            pytest.fail(ABSENT, pytrace=False)
        pytest.skip(ABSENT, allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Stands in for each test file where the engine cannot be imported."""
    # Ours tells the venv that was made for these tests from one where an sglang serves.
    if importlib.util.find_spec("sglang_on_cpu") is None:
        module: pytest.Module = _NotHere.from_parent(parent, path=module_path)
        return module
    return None
