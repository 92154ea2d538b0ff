"""What is measured side by side: each stores, reads and looks for one batch, and is timed.

All of them work on the buffers of one `Memory`. Batches are known by number, from 0 up to the turns
of that memory, so that neither side's pages are in a CPU cache when their turn comes again. What
was read is compared, every byte of it, outside the timed part.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from raw_end import READ, REQUEST, WRITE
from rounds import Side, StoreSide, timed

from l3store import registry
from l3store.servers.process import HOST

if TYPE_CHECKING:
    from figures import Half
    from pages import Memory

__all__ = ["Ours", "Raw", "RedisPy"]

_PLACE = "bench-redis/kv/all"
_PATIENCE = "60s"
"""Deadline of the wrapped store: the machine may be busy, and a late call would be an error."""


class Ours(StoreSide):
    """Our store: bare, or inside the wrappers of `registry.open`, which verify each page."""

    def __init__(self, name: str, memory: Memory, url: str, *, bare: bool = False) -> None:
        given = url if bare else f"{url}{'&' if '?' in url else '?'}deadline={_PATIENCE}"
        super().__init__(name, memory, _PLACE, registry.open(given, raw=bare))


class RedisPy(Side):
    """redis-py with hiredis as people write it: MSET of bytes, MGET and a copy into the page."""

    def __init__(self, name: str, memory: Memory, **where: Any) -> None:
        super().__init__(name, memory, _PLACE)
        self._client = redis.Redis(**where, protocol=2)

    def put(self, number: int) -> Half:
        batch = self._batch(number)
        self._memory.sealed(batch, number, _PLACE)
        pages = [pieces[0] for pieces in self._memory.pieces(number)]
        names = [f"redis-py:{key}" for key in batch.keys]
        half, _ = timed(
            lambda: self._client.mset(
                {name: bytes(page) for name, page in zip(names, pages, strict=True)}
            )
        )
        return half

    def get(self, number: int) -> Half:
        batch = self._batch(number)
        self._memory.poison(number)
        pages = [pieces[0] for pieces in self._memory.pieces(number)]
        names = [f"redis-py:{key}" for key in batch.keys]

        def read() -> list[bool]:
            values = self._client.mget(names)
            for value, page in zip(values, pages, strict=True):
                page[:] = value
            return [True] * len(pages)

        half, done = timed(read)
        self._compared(number, done)
        return half

    def exists(self, number: int) -> Half:
        """Looks for a batch that is there: one EXISTS a key in a pipeline."""
        names = [f"redis-py:{key}" for key in self._batch(number).keys]

        def look() -> list[int]:
            with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.exists(name)
                found: list[int] = pipe.execute()
                return found

        half, found = timed(look)
        if sum(found) != len(names):
            raise SystemExit(f"{self.name} finds {sum(found)} of {len(names)} pages")
        return half

    def close(self) -> None:
        self._client.close()


class Raw(Side):
    """One connection and nothing else: recv_into the pages, sendall from them."""

    def __init__(self, name: str, memory: Memory, folder: str, *, unix: bool) -> None:
        super().__init__(name, memory, _PLACE)
        path = Path(folder, "raw")
        path.unlink(missing_ok=True)
        size = memory.turns * memory.shape.batch_bytes
        self._end = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("raw_end.py"), path, str(size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._end.stdout is not None
        port = int(self._end.stdout.readline())
        if unix:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(path))
        else:
            self._socket = socket.create_connection((HOST, port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, number: int) -> Half:
        self._memory.sealed(self._batch(number), number, _PLACE)
        pages = [pieces[0] for pieces in self._memory.pieces(number)]

        def write() -> None:
            self._socket.sendall(self._request(WRITE, number))
            for page in pages:
                self._socket.sendall(page)
            self._socket.recv(1)

        return timed(write)[0]

    def get(self, number: int) -> Half:
        self._memory.poison(number)
        pages = [pieces[0] for pieces in self._memory.pieces(number)]

        def read() -> list[bool]:
            self._socket.sendall(self._request(READ, number))
            wanted = socket.MSG_WAITALL
            return [self._socket.recv_into(page, 0, wanted) == len(page) for page in pages]

        half, done = timed(read)
        self._compared(number, done)
        return half

    def close(self) -> None:
        self._socket.close()
        self._end.kill()
        self._end.communicate()

    def _request(self, what: int, number: int) -> bytes:
        size = self._memory.shape.batch_bytes
        return REQUEST.pack(what, number * size, size)
