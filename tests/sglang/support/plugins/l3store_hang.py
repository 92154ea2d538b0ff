"""``hang:///folder``: a `file` store in ``folder/store`` whose calls hang while a file says so.

``folder/hang`` names in each line a call, and optionally part of a key: ``page_get T1of2``. A call
with such a key stays where it is until the line is gone; meanwhile ``folder/hanging`` has a file
for it. It is a backend of somebody else's, found by the entry point of the distribution beside it.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from l3store import registry
from l3store.wrap._base import Wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.config import StoreURL

__all__ = ["Hang"]


class Hang(Wrapper):
    @classmethod
    def from_url(cls, url: StoreURL) -> Hang:
        return cls(Path(url.path))

    def __init__(self, folder: Path) -> None:
        (folder / "hanging").mkdir(parents=True, exist_ok=True)
        super().__init__(registry.open(f"file://{folder}/store", raw=True))
        self._folder = folder

    def _hang(self, call: str, keys: Sequence[str]) -> None:
        if self._is_to(call, keys):
            with tempfile.NamedTemporaryFile(dir=self._folder / "hanging", prefix=call):
                while self._is_to(call, keys):
                    time.sleep(0.02)

    def _is_to(self, call: str, keys: Sequence[str]) -> bool:
        with suppress(FileNotFoundError):
            for line in (self._folder / "hang").read_text().splitlines():
                named, _, part = line.partition(" ")
                if named == call and any(part in key for key in keys):
                    return True
        return False

    def batch_exists(self, keys: Sequence[str]) -> int:
        self._hang("batch_exists", keys)
        return self.inner.batch_exists(keys)

    def page_get(self, keys: Sequence[str], *rest: Any) -> list[bool]:
        self._hang("page_get", keys)
        return self.inner.page_get(keys, *rest)

    def page_set(self, keys: Sequence[str], *rest: Any) -> list[bool]:
        self._hang("page_set", keys)
        return self.inner.page_set(keys, *rest)
