"""The reference backend keeps the contract."""

from __future__ import annotations

from l3store.testing.backend import BackendSuite
from l3store.testing.suite_bounds import BoundsSuite


class _Memory:
    full = "none"

    def url(self, tmp_path):
        return "memory://"

    def raw_read(self, backend, key):
        return backend._pages.get(key)

    def raw_write(self, backend, key, data):
        backend._pages[key] = data

    def small_url(self, tmp_path, page_bytes, pages):
        return f"memory://?capacity={page_bytes * pages}&evict={self.full}"


class TestMemory(_Memory, BackendSuite):
    pass


class TestMemoryThatEvicts(_Memory, BoundsSuite):
    """Only the tests in which a store is full: the others would be the same again."""

    evicts = True
    full = "lru"
