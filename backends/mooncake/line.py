"""An idle connection to the master, by which its death is known at once.

The library itself asks a dead master for 4 s before it says so, and its health check says yes for
as long. A connection of our own tells in a microsecond: the kernel ends it with the process at its
other end. A master that is frozen or cut off does not end it: that is what timeouts are for.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

from l3store.abc import time_left
from l3store.errors import BackendUnavailable

if TYPE_CHECKING:
    from l3store.backends.mooncake.options import Address

__all__ = ["Line"]


class Line:
    """Says whether the master's process lives. Thread-safe."""

    def __init__(self, master: Address, seconds: float) -> None:
        self._master, self._seconds = master, seconds
        self._lock = Lock()
        self._socket: socket.socket | None = None
        self.lives = 0
        """How often the master was reached anew: it may be another process by then, which knows
        nothing of what was stored."""

    def check(self) -> None:
        """Returns when the master's process lives; blocks only to reach it anew.

        Raises:
            BackendUnavailable: Nobody listens at its address.
        """
        connection = self._socket
        if connection is None or not _stands(connection):
            self._reach(connection)

    def own_address(self) -> str:
        """Returns the address of this machine by which it reaches the master."""
        self.check()
        connection = self._socket
        return "" if connection is None else str(connection.getsockname()[0])

    def doubt(self) -> None:
        """Reaches the master anew before the next call: the last one said that it is gone."""
        with self._lock:
            self._drop()

    def close(self) -> None:
        """Ends the connection; the next check makes another one."""
        self.doubt()

    def _reach(self, seen: socket.socket | None) -> None:
        with self._lock:
            if self._socket is not None and self._socket is not seen and _stands(self._socket):
                return  # another thread was first
            self._drop()
            left = time_left()
            seconds = self._seconds if left is None else max(0.001, min(left, self._seconds))
            try:
                self._socket = socket.create_connection(self._master, timeout=seconds)
            except OSError as error:
                raise BackendUnavailable(
                    f"no Mooncake master answers at {self._master}: {error}"
                ) from error
            self._socket.setblocking(False)
            self.lives += 1

    def _drop(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
            self._socket = None


def _stands(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
