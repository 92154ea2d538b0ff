"""`BackendSuite`: the twelve promises of the backend contract, as tests to inherit.

    from l3store.testing.backend import BackendSuite

    class TestMine(BackendSuite):
        def url(self, tmp_path): return f"mine://{tmp_path}/store"
        def raw_read(self, backend, key): ...
        def raw_write(self, backend, key, data): ...
        def small_url(self, tmp_path, page_bytes, pages): ...
        def unreachable(self, backend): ...

Run pytest on it. docs/write-a-backend.md goes through it step by step.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from l3store.testing.kit import promise
from l3store.testing.stateful import check_against_model
from l3store.testing.suite_bounds import BoundsSuite
from l3store.testing.suite_hostile import HostileSuite
from l3store.testing.suite_late import LateSuite
from l3store.testing.suite_names import NamesSuite
from l3store.testing.suite_pages import PageSuite
from l3store.testing.suite_sharing import SharingSuite

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BackendSuite"]


class BackendSuite(PageSuite, SharingSuite, LateSuite, BoundsSuite, HostileSuite, NamesSuite):
    """All tests; what an author fills in stands in `l3store.testing.suite.Suite`."""

    @promise(2, 3, 4, 12)
    def test_any_sequence_of_calls_agrees_with_a_dict(self, tmp_path: Path) -> None:
        """A hypothesis state machine: set, get, exists, delete, damage, reopen, descriptors."""
        numbers = itertools.count()

        def new_url() -> str:
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
            return self.url(folder)

        check_against_model(self, new_url)
