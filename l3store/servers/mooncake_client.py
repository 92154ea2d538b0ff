"""Mooncake's own client, as other programs have it: for tests and benchmarks."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from l3store.errors import BackendUnavailable
from l3store.servers.process import HOST

__all__ = ["BareClient"]

_ABSENT = -704


class BareClient:
    """A client of the library in this process. From any thread; it ends with the process.

    Args:
        port: Of the master on 127.0.0.1.

    Raises:
        BackendUnavailable: The master does not answer.
    """

    def __init__(self, port: int) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self.store: Any = MooncakeDistributedStore()
        """The library's object, for what is not here."""
        if self.store.setup(HOST, "P2PHANDSHAKE", 0, 0, "tcp", "", f"{HOST}:{port}") != 0:
            raise BackendUnavailable(f"no Mooncake master answers at {HOST}:{port}")
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True

    def read(self, name: str) -> bytes | None:
        """Returns an object's bytes, or None where there is none."""
        size = self.store.get_size(name)
        if size < 0:
            return None
        memory = (ctypes.c_char * size)()
        got = self.store.get_into(name, ctypes.addressof(memory), size)
        return memory.raw if got == size else None

    def write(self, name: str, data: bytes, *, pinned: bool = False) -> None:
        """Replaces an object; an empty one cannot be, and is absent then.

        Raises:
            BackendUnavailable: The library refuses it.
        """
        code = self.store.remove(name, True)
        if code in (0, _ABSENT):
            code = 0
            if data:
                memory = ctypes.create_string_buffer(data, len(data))
                options = (self._pinned,) if pinned else ()
                code = self.store.put_from(name, ctypes.addressof(memory), len(data), *options)
        if code != 0:
            raise BackendUnavailable(f"writing {name!r}: {code}")

    def remove(self, name: str) -> bool:
        """Removes an object, whatever its lease; returns whether there was one."""
        return bool(self.store.remove(name, True) == 0)

    def remove_all(self, prefix: str) -> None:
        """Removes all objects whose names begin so, with a slash behind."""
        self.store.remove_by_regex(f"^{re.escape(prefix)}/", True)
