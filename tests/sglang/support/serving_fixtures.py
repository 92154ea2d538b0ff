"""The fixtures of the test files that start engines: one nursery for the whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from serving import Engine, Nursery, nursery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def engines() -> Iterator[Nursery]:
    with nursery() as one:
        yield one


@pytest.fixture
def new_engine(engines: Nursery) -> Iterator[Callable[..., Engine]]:
    """Starts an engine with the tiny model; it ends with the test."""
    started = []

    def start(extra, *, seed=0, **args):
        started.append(engines.engine())
        return started[-1].start(engines.model(seed), extra, **args)

    yield start
    for one in started:
        one.kill()
