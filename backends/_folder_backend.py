"""What is the same in all backends that lie in a folder: small files, errors, the health check."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from l3store.abc import Backend
from l3store.errors import BackendUnavailable, CapacityError
from l3store.keys import check_meta_name
from l3store.page import check_meta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from l3store.backends._folder import Folder
    from l3store.calls import Gate

__all__ = ["FULL", "FolderBackend"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a file system says that takes no more."""


class FolderBackend(Backend):
    """A subclass sets `_folder` and `_gate` before the first call."""

    _folder: Folder
    _gate: Gate

    def put_meta(self, name: str, data: bytes) -> None:
        check_meta(name, data)
        with self._call():
            if self.capabilities.read_only:
                raise BackendUnavailable(f"{self._folder.name} was opened read-only")
            self._folder.put_meta(name, data)

    def get_meta(self, name: str) -> bytes | None:
        check_meta_name(name)
        with self._call():
            return self._folder.get_meta(name)

    def list_meta(self) -> list[str]:
        with self._call():
            return self._folder.list_meta()

    def _check_writing(self) -> None:
        """Writes a small file, reads it and removes it, also when that fails.

        Raises:
            BackendUnavailable: It does not come back as it was written.
        """
        path = self._folder.temporary([memoryview(b"health")])
        try:
            echo = self._folder.read(path, 64)
        finally:
            self._folder.remove(path)
        if echo != b"health":
            raise BackendUnavailable(f"{self._folder.name} does not give back what it took")

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._gate:
            try:
                yield
            except OSError as error:
                if isinstance(error, BackendUnavailable | CapacityError):
                    raise
                raise BackendUnavailable(
                    f"{self._folder.name}: {error.strerror or error}"
                ) from error
