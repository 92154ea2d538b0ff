"""The file backend keeps the contract, on a real file system that runs full."""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from l3store.testing.backend import BackendSuite
from l3store.testing.plugin import NotHere

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class TestFile(BackendSuite):
    @pytest.fixture(autouse=True)
    def _mounts(self):
        self._mounted = []
        yield
        for folder in self._mounted:
            subprocess.run(["umount", str(folder)], check=True)

    def url(self, tmp_path):
        return f"file://{tmp_path}/store"

    def _path(self, backend, key):
        place, _, digits = key.rpartition("/")
        return Path(backend._folder.name) / "pages" / place / digits[:2] / digits

    def raw_read(self, backend, key):
        path = self._path(backend, key)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, backend, key, data):
        self._path(backend, key).write_bytes(data)

    def small_url(self, tmp_path, page_bytes, pages):
        """A tmpfs of that size: the file system itself says that it is full."""
        folder = tmp_path / "small"
        folder.mkdir()
        blocks = pages * -(-page_bytes // 4096)
        command = ["mount", "-t", "tmpfs", "-o", f"size={blocks * 4096}", "none", str(folder)]
        if subprocess.run(command, capture_output=True).returncode:
            raise NotHere("a tmpfs cannot be mounted here")
        self._mounted.append(folder)
        return f"file://{folder}/store"

    @contextmanager
    def unreachable(self, backend):
        """The folder of pages and the one for temporary files become files, each in one step."""
        root = Path(backend._folder.name)
        for name in ("pages", "tmp"):
            (root / f"{name}.away").write_bytes(b"")
            _exchange(root / name, root / f"{name}.away")
        try:
            yield
        finally:
            for name in ("pages", "tmp"):
                _exchange(root / name, root / f"{name}.away")
                (root / f"{name}.away").unlink()


def _exchange(one, two):
    """Two renames would leave a moment in which a running call makes the folder anew."""
    done = ctypes.CDLL(None, use_errno=True).renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(two), _RENAME_EXCHANGE
    )
    if done:
        raise OSError(ctypes.get_errno(), "renameat2", str(one))
