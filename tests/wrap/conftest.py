"""A chain of sealed pages, and room to read them into."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from l3store import page
from l3store.backends.memory import MemoryBackend
from l3store.keys import Chain
from l3store.metrics import Metrics

PLACE = "m-1/kv/all"


@dataclass
class Pages:
    """`count` pages of `size` payload bytes, page i filled with byte i + 1."""

    count: int = 8
    size: int = 64
    place: str = PLACE
    chain: Chain = field(init=False)

    def __post_init__(self):
        self.chain = Chain.from_tokens(range(self.count), 1)

    @property
    def keys(self):
        return self.chain.keys(self.place)

    def sealed(self):
        payloads = [(memoryview(bytearray([i + 1]) * self.size),) for i in range(self.count)]
        return page.seal(self.place, self.chain, payloads)

    def room(self):
        return page.frame([(memoryview(bytearray(self.size)),) for _ in range(self.count)])

    def payload(self, i):
        return bytes([i + 1]) * self.size


@pytest.fixture
def pages():
    return Pages()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def memory():
    with MemoryBackend() as store:
        yield store


@pytest.fixture
def filled(memory, pages):
    assert all(memory.page_set(pages.keys, pages.sealed()))
    return memory
