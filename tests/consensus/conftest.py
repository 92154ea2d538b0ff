"""What takes long is begun early: searches run while other tests wait for their processes.

Examples of hypothesis have no deadline: how long one takes is the machine's business.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from multiprocessing import get_context

import pytest
from hypothesis import settings

from l3store.testing.simulation.broken import BROKEN
from l3store.testing.simulation.search import search

settings.register_profile("consensus", deadline=None)
settings.load_profile("consensus")

NICER = 5
"""Than the tests, whose time it must not take."""
SEEDS = 2000
"""In which a deliberate fault is to be found."""
GROUPS, PART = 3000, 100


class Aside:
    """One process that makes searches in their order; it ends when the last one was asked for."""

    def __init__(self):
        context = get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, initializer=os.nice, initargs=(NICER,))
        self.open = set()

    def search(self, *given, **how):
        """Returns a search to come."""
        found = Search(self, given, how)
        self.open.add(found)
        return found

    def end(self):
        """Makes no more of them."""
        self.pool.shutdown(cancel_futures=True)


class Search:
    """A search that is made aside when its turn comes; who needs it before makes it himself."""

    def __init__(self, aside, given, how):
        self._aside, self._given, self._how = aside, given, how
        self._future = aside.pool.submit(search, *given, **how)

    @cached_property
    def tally(self):
        """What was found."""
        here = self._future.cancel()
        found = search(*self._given, **self._how) if here else self._future.result()
        self._aside.open.discard(self)
        if not self._aside.open:
            self._aside.end()
        return found


@pytest.fixture(scope="session")
def aside():
    found = Aside()
    yield found
    found.end()


@pytest.fixture(scope="session")
def searches(aside):
    """A search for each deliberate fault, by its name."""
    return {name: aside.search(range(SEEDS), [name], stop=True) for name in BROKEN}


@pytest.fixture(scope="session")
def thousands(aside):
    """A search of thousands of groups of both protocols, in parts."""
    parts = [range(first, first + PART) for first in range(0, GROUPS, PART)]
    return [aside.search(part, ["reports", "collective"]) for part in parts]


@pytest.fixture(scope="session", autouse=True)
def _begun_early(request):
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in ("searches", "thousands"):
        if name in wanted:
            request.getfixturevalue(name)
