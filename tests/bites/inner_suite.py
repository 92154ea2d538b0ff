"""The suite over every broken backend: run by test_bites.py in a pytest of its own."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path

from l3store import registry
from l3store.backends.file import FileBackend
from l3store.testing.backend import BackendSuite

_spec = importlib.util.spec_from_file_location("broken", Path(__file__).with_name("broken.py"))
broken = sys.modules["broken"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(broken)

_found = registry._found
registry._found = lambda: (
    _found()
    | {
        name: EntryPoint(name, f"broken:{kind.__name__}", registry.GROUP)
        for name, kind in broken.BROKEN.items()
    }
)


class _OverMemory(BackendSuite):
    def url(self, tmp_path):
        return f"{self.scheme}://"

    def raw_read(self, backend, key):
        return backend._pages.get(key)

    def raw_write(self, backend, key, data):
        backend._pages[key] = data

    def small_url(self, tmp_path, page_bytes, pages):
        return f"{self.scheme}://?capacity={page_bytes * pages}&evict=none"


class _OverFile(BackendSuite):
    def url(self, tmp_path):
        return f"{self.scheme}://{tmp_path}/store"

    def _path(self, backend, key):
        place, _, digits = key.rpartition("/")
        return Path(backend._folder.name) / "pages" / place / digits[:2] / digits

    def raw_read(self, backend, key):
        path = self._path(backend, key)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, backend, key, data):
        self._path(backend, key).write_bytes(data)

    @contextmanager
    def unreachable(self, backend):
        root = Path(backend._folder.name)
        (root / "pages").rename(root / "away")
        (root / "pages").write_bytes(b"")
        try:
            yield
        finally:
            (root / "pages").unlink()
            (root / "away").rename(root / "pages")


for _name, _kind in broken.BROKEN.items():
    _base = _OverFile if issubclass(_kind, FileBackend) else _OverMemory
    globals()[f"Test{_kind.__name__}"] = type(
        f"Test{_kind.__name__}", (_base,), {"scheme": _name, "expect": _kind.expect}
    )
