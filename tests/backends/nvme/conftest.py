"""Peers of a store, from one nursery for the whole run."""

from __future__ import annotations

import pytest

from tests.backends.nvme import _kit


@pytest.fixture(scope="session")
def _nursery(tmp_path_factory):
    with _kit.nursery(tmp_path_factory.mktemp("nursery") / "s") as start:
        yield start


@pytest.fixture
def peer(_nursery):
    """Starts a process; all end with the test, stopped ones too."""
    started = []

    def start():
        started.append(_nursery())
        return started[-1]

    yield start
    for one in started:
        one.kill()
