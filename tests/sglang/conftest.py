"""What the tests against the real engine share, and what the engine's absence means."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import Any

    from hicache_rank import Rank

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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What sglang and the adapter read of a model, without one that could be served."""
    from hicache_rank import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def new_rank(model: Path) -> Iterator[Callable[..., Rank]]:
    """Makes ranks of `hicache_rank`: their extra config, and what else differs from a default."""
    from hicache_rank import Rank

    made: list[Rank] = []

    def make(extra: dict[str, Any] | None, **kwargs: Any) -> Rank:
        made.append(Rank(kwargs.pop("model", model), extra, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()
