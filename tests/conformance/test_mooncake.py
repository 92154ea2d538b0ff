"""The Mooncake backend keeps the contract, on a real master and a process that lends memory."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest

from l3store.errors import ConfigError
from l3store.servers.mooncake import LEAST_SEGMENT, MooncakeServer
from l3store.servers.mooncake_client import BareClient
from l3store.testing.backend import BackendSuite
from l3store.testing.plugin import NotHere

_numbers = itertools.count()
_PIECE = 64 << 10  # the allocator rounds larger ones up by much
# A put whose process is gone is given up after a second; the master looks when its key is put.
_SETTINGS = {"put_start_discard_timeout_sec": 1}


def _started(segment, **settings):
    try:
        return MooncakeServer(segment=segment, settings=_SETTINGS | settings)
    except ConfigError as error:
        raise NotHere(str(error)) from error


class TestMooncake(BackendSuite):
    evicts = True

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _servers(cls):
        with _started(segment=256 << 20) as cls.server:
            cls.bare = BareClient(cls.server.port)
            cls.small, cls.small_prefixes = None, []
            yield
            if cls.small is not None:
                cls.small.stop()

    def url(self, tmp_path):
        return f"{self.server.url}&prefix=t{next(_numbers)}&timeout=600ms"

    def _name(self, backend, key):
        return f"{backend._options.prefix}/page/{key}"

    def raw_read(self, backend, key):
        return self.bare.read(self._name(backend, key))

    def raw_write(self, backend, key, data):
        self.bare.write(self._name(backend, key), data)

    def small_url(self, tmp_path, page_bytes, pages):
        """The least memory that can be lent, most of it taken by objects that stay."""
        cls = type(self)
        if cls.small is None:
            cls.small = _started(
                segment=LEAST_SEGMENT, eviction_high_watermark_ratio=1, default_kv_lease_ttl=500
            )
            cls.small_bare = BareClient(cls.small.port)
        for prefix in cls.small_prefixes:
            cls.small_bare.remove_all(prefix)
        ballast, pieces = f"ballast{next(_numbers)}", (LEAST_SEGMENT - pages * page_bytes) // _PIECE
        for i in range(pieces - 1):
            cls.small_bare.write(f"{ballast}/{i}", bytes(_PIECE), pinned=True)
        prefix = f"small{next(_numbers)}"
        cls.small_prefixes += [prefix, ballast]
        return f"{self.small.url}&prefix={prefix}&deadline=30s"

    @contextmanager
    def unreachable(self, backend):
        """The master stands still: a killed one would have forgotten every page."""
        self.server.freeze()
        try:
            yield
        finally:
            self.server.thaw()
