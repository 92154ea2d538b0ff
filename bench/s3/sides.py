"""What is measured side by side: each stores, reads and looks for one batch, and is timed.

All work on the buffers of one `Memory`. Batches are known by number, from 0 up to the turns of that
memory, so that no side's pages are in a CPU cache when their turn comes again. What was read is
compared, every byte of it, outside the timed part.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import obstore
from botocore.config import Config
from figures import Half
from obstore.store import S3Store
from peer_process import PeerProcess
from rounds import Side, StoreSide, timed

from l3store import registry
from l3store.replay import payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from pages import Memory
    from servers import Where

__all__ = ["THREADS", "Boto3", "LMCache", "Obstore", "Ours"]

THREADS = 8
"""As many as ours has workers by default."""
_PLACE = "bench-s3/kv/all"
_PATIENCE = "deadline=60s&timeout=20s"
"""The machine may be busy, and a late call would be an error."""
_COMMON = Path(__file__).parents[1] / "common"
_NOWHERE = 1 << 20  # the number of a batch that nobody has stored


class Ours(StoreSide):
    """Our store: bare, or inside the wrappers of `registry.open`, which verify each page."""

    def __init__(
        self, name: str, memory: Memory, where: Where, *, bare: bool = False, options: str = ""
    ) -> None:
        store = registry.open(f"{where.url}&{_PATIENCE}{options}", raw=bare)
        super().__init__(name, memory, _PLACE, store)

    def exists(self, number: int, present: int | None = None) -> Half:
        """Looks for a batch of which the first `present` pages are there; None: all."""
        if present is None:
            return super().exists(number)
        keys = self._batch(number).keys
        return self._found(keys[:present] + self._batch(_NOWHERE).keys[present:], present)


class _Threads(Side):
    """A client library in a few threads, as people write it."""

    def __init__(self, name: str, memory: Memory) -> None:
        super().__init__(name, memory, _PLACE)
        self._pool = ThreadPoolExecutor(THREADS)

    def put(self, number: int) -> Half:
        self._memory.sealed(self._batch(number), number, _PLACE)
        return self._each(self._put, number)

    def get(self, number: int) -> Half:
        self._memory.poison(number)
        half = self._each(self._get, number)
        self._compared(number, [True] * self._memory.shape.batch)
        return half

    def exists(self, number: int) -> Half:
        names = self._names(number)
        return timed(lambda: list(self._pool.map(self._head, names)))[0]

    def close(self) -> None:
        self._pool.shutdown()

    def _each(self, call: Callable[[str, memoryview], None], number: int) -> Half:
        names, pages = self._names(number), [one[0] for one in self._memory.pieces(number)]
        return timed(lambda: list(self._pool.map(call, names, pages)))[0]

    def _names(self, number: int) -> list[str]:
        return [f"{self.name}/{key}" for key in self._batch(number).keys]

    def _put(self, name: str, page: memoryview) -> None:
        raise NotImplementedError

    def _get(self, name: str, page: memoryview) -> None:
        raise NotImplementedError

    def _head(self, name: str) -> Any:
        raise NotImplementedError


class Obstore(_Threads):
    """obstore alone."""

    def __init__(self, name: str, memory: Memory, where: Where) -> None:
        super().__init__(name, memory)
        self._store = S3Store(
            where.bucket, endpoint=where.endpoint, region="us-east-1",
            access_key_id=where.access_key, secret_access_key=where.secret_key,
            unsigned_payload=True, client_options={"allow_http": True},
        )  # fmt: skip

    def _put(self, name: str, page: memoryview) -> None:
        obstore.put(self._store, name, page, use_multipart=False)

    def _get(self, name: str, page: memoryview) -> None:
        page[:] = memoryview(obstore.get(self._store, name).bytes())

    def _head(self, name: str) -> Any:
        return obstore.head(self._store, name)


class Boto3(_Threads):
    """boto3 alone."""

    def __init__(self, name: str, memory: Memory, where: Where) -> None:
        super().__init__(name, memory)
        self._bucket = where.bucket
        self._s3 = boto3.client(
            "s3", endpoint_url=where.endpoint, region_name="us-east-1",
            aws_access_key_id=where.access_key, aws_secret_access_key=where.secret_key,
            config=Config(
                max_pool_connections=THREADS, request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )  # fmt: skip

    def _put(self, name: str, page: memoryview) -> None:
        self._s3.put_object(Bucket=self._bucket, Key=name, Body=bytes(page))

    def _get(self, name: str, page: memoryview) -> None:
        page[:] = self._s3.get_object(Bucket=self._bucket, Key=name)["Body"].read()

    def _head(self, name: str) -> Any:
        return self._s3.head_object(Bucket=self._bucket, Key=name)

    def close(self) -> None:
        super().close()
        self._s3.close()


class LMCache(Side):
    """LMCache's S3 adapter in a process and an environment of its own."""

    def __init__(self, name: str, memory: Memory, where: Where, folder: str, python: str) -> None:
        super().__init__(name, memory, _PLACE)
        shape = memory.shape
        slots = str(memory.turns * shape.batch)
        command = [
            python, str(Path(__file__).parent / "peers" / "lmcache_s3.py"),
            "--address", where.endpoint.partition("//")[2], "--dir", folder,
            "--page-bytes", str(shape.page_bytes), "--slots", slots, "--pages", slots,
            "--payload", payload.__file__,
        ]  # fmt: skip
        environment = {
            **os.environ, "PYTHONPATH": str(_COMMON), "AWS_ACCESS_KEY_ID": where.access_key,
            "AWS_SECRET_ACCESS_KEY": where.secret_key,
        }  # fmt: skip
        log = str(Path(folder, f"{name}.log"))
        self._process = PeerProcess(name, command, log, shape.batch, environment)

    def put(self, number: int) -> Half:
        return self._process.put(number)

    def get(self, number: int) -> Half:
        return self._process.get(number)

    def exists(self, number: int, present: int | None = None) -> Half:
        """Looks for a batch that is there, or with 0 for one that is not."""
        if present is None:
            return self._process.exists(number)
        answer = self._process._ask("exists", _NOWHERE + number)
        if answer["done"] != present:
            raise SystemExit(f"{self.name} finds {answer['done']} pages that are not there")
        return Half(answer["wall"], answer["cpu"])

    def close(self) -> None:
        self._process.close()
