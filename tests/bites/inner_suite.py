"""The suite over every broken backend: run by test_bites.py in a pytest of its own."""

from __future__ import annotations

import over_file
import over_memory
from broken import BROKEN, HEALTHY

from l3store.backends.file import FileBackend


def _suite_of(scheme, kind):
    base = over_file.TestFile if issubclass(kind, FileBackend) else over_memory.TestMemory

    class Over(base):
        expect, evicts = kind.expect, kind.evicts
        full = "lru" if kind.evicts else "none"

        def url(self, tmp_path):
            return f"{scheme}:{super().url(tmp_path).partition(':')[2]}"

        def small_url(self, *args):
            return f"{scheme}:{super().small_url(*args).partition(':')[2]}"

    Over.__name__ = f"Test{kind.__name__}"
    return Over


for _scheme, _kind in (HEALTHY | BROKEN).items():
    globals()[f"Test{_kind.__name__}"] = _suite_of(_scheme, _kind)
