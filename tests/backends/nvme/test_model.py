"""Any sequence of calls of several stores on one folder, against a model that is a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from l3store.errors import CapacityError
from tests.backends.nvme._kit import SEGMENT, look_after, opened, put, readable, some, stored_bytes

SEGMENTS = 8
PLACES = {"kit-0/kv/all": 4096, "kit-0/indexer/all": 700, "kit-0/mamba/all": 9000}

names = st.sampled_from(["one", "two", "three"])
batches = st.builds(
    lambda place, seed, count: some(count, seed=seed, size=PLACES[place], place=place),
    st.sampled_from(sorted(PLACES)), st.integers(0, 5), st.integers(1, 20),
)  # fmt: skip


class Stores(RuleBasedStateMachine):
    """What the stores say they hold, they all hold; what was removed is gone for all.

    Pages may leave for room. So the model knows which pages can be there; that all stores agree
    on which are there, and give back the right bytes, is asked of the stores.
    """

    evict = "lru"
    options: ClassVar = {}

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stores = {}
        self.model = {}  # key -> whether it must be there

    def store(self, name):
        if name not in self.stores:
            self.stores[name] = opened(
                self.folder / "s", capacity=SEGMENTS * SEGMENT, evict=self.evict, writers=3,
                **self.options,
            )  # fmt: skip
        return self.stores[name]

    @rule(name=names, pages=batches)
    def put(self, name, pages):
        try:
            done = put(self.store(name), pages)
        except CapacityError as error:
            done = error.done
        if self.evict == "none":
            for key, good in zip(pages.keys, done, strict=True):
                assert good or not self.model.get(key)
        self.model.update((key, True) for key, good in zip(pages.keys, done, strict=True) if good)

    @rule(name=names, pages=batches, offset=st.sampled_from([0, 1, 512]))
    def read(self, name, pages, offset):
        for key, good in zip(pages.keys, readable(self.store(name), pages, offset), strict=True):
            self.judge(key, good)

    @rule(name=names, pages=batches)
    def delete(self, name, pages):
        done = self.store(name).delete(pages.keys)
        for key, good in zip(pages.keys, done, strict=True):
            self.judge(key, good)
            self.model[key] = False

    def judge(self, key, good):
        if good or self.evict == "none":
            assert good == self.model.get(key, False), key

    @rule(name=names)
    def look_after(self, name):
        look_after(self.store(name))

    @rule(name=names)
    @precondition(lambda self: self.stores)
    def close(self, name):
        if name in self.stores:
            self.stores.pop(name).close()

    @rule(pages=batches)
    def look(self, pages):
        """A tool that opens the store beside them and changes nothing."""
        if self.stores:
            with opened(self.folder / "s", mode="ro") as tool:
                assert tool.check_integrity() == []
                for key, good in zip(pages.keys, readable(tool, pages), strict=True):
                    self.judge(key, good)

    @invariant()
    def they_agree(self):
        keys = list(self.model)
        views = {name: store.exists_each(keys) for name, store in self.stores.items()}
        for name, view in views.items():
            assert view == next(iter(views.values())), name
            for key, there in zip(keys, view, strict=True):
                self.judge(key, there)
            assert self.stores[name].check_integrity() == []
        if self.stores:
            assert stored_bytes(self.folder / "s") <= SEGMENTS * SEGMENT
            usage = next(iter(self.stores.values())).usage()
            assert sum(one.pages for one in usage) == sum(next(iter(views.values())))

    def teardown(self):
        for store in self.stores.values():
            store.close()
        shutil.rmtree(self.folder)


class StoresThatRefuse(Stores):
    evict = "none"


class StoresThatSync(Stores):
    evict = "sweep"
    options: ClassVar = {"durability": "batch", "io": "page"}


@pytest.mark.parametrize("machine", [Stores, StoresThatRefuse, StoresThatSync])
def test_any_sequence(machine):
    case = machine.TestCase
    case.settings = settings(
        max_examples=14, stateful_step_count=25, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case("runTest").runTest()
