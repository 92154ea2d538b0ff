"""The nvme backend keeps the contract, with direct and with buffered I/O, full or evicting."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress

from l3store import page
from l3store.backends.nvme.format import RECORD_BYTES, Geometry, pack_record
from l3store.errors import IntegrityError
from l3store.keys import split_keys
from l3store.testing.backend import BackendSuite


class TestNvme(BackendSuite):
    io = "direct"

    def url(self, tmp_path):
        return f"nvme://{tmp_path}/store?capacity=1GiB&io={self.io}"

    def _at(self, backend, key):
        with backend._catalog.lock:
            (location,) = backend._catalog.found(split_keys((key,)), unproved=True)
            return None if location is None else backend._catalog.at(location)

    def raw_read(self, backend, key):
        at = self._at(backend, key)
        if at is None:
            return None
        with open(f"{backend._folder.name}/seg-{at.segment.number:06d}", "rb") as file:
            record = _record(file, at.slot)
            length = int.from_bytes(record[144:152], "little")
            file.seek(_offset(at))
            return record[:128] + file.read(length)

    def raw_write(self, backend, key, data):
        """A whole header gets a record that holds, so that only the page itself is damaged."""
        at = self._at(backend, key)
        with open(f"{backend._folder.name}/seg-{at.segment.number:06d}", "r+b") as file:
            old = _record(file, at.slot)
            generation = int.from_bytes(old[128:136], "little") + 1
            record = pack_record(data[:128].ljust(128, b"\0"), generation, max(0, len(data) - 128))
            if not _whole(data):
                record = record[:152] + old[152:]
            file.seek(_offset(at))
            file.write(data[128 : 128 + at.segment.geometry.slot_bytes])
            file.seek(4096 + at.slot * RECORD_BYTES)
            file.write(record)

    evict = "none"

    def small_url(self, tmp_path, page_bytes, pages):
        """Four segments that hold `pages` pages between them."""
        payload = page_bytes - 128
        size = 12288
        while Geometry(size, payload).slots * 4 < pages:
            size += 4096
        return (
            f"nvme://{tmp_path}/small?capacity={4 * size}&segment={size}"
            f"&io={self.io}&evict={self.evict}"
        )

    @contextmanager
    def unreachable(self, backend):
        """Every descriptor that is open below the store becomes one of a folder: EISDIR."""
        root = backend._folder.name
        folder = os.open("/", os.O_RDONLY)
        below = [file for file, path in _open_files() if path.startswith(f"{root}/")]
        taken = {}
        for file in below:
            taken[file] = os.dup(file)
            os.dup2(folder, file, inheritable=False)
        try:
            yield
        finally:
            for file, kept in taken.items():
                os.dup2(kept, file, inheritable=False)
                os.close(kept)
            os.close(folder)


class TestNvmeThatEvicts(TestNvme):
    io = "page"
    evicts = True
    evict = "lru"


def _open_files():
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


def _whole(data):
    try:
        page.parse(data)
    except IntegrityError:
        return False
    return True


def _offset(at):
    return at.segment.geometry.data_offset + at.slot * at.segment.geometry.slot_bytes


def _record(file, slot):
    file.seek(4096 + slot * RECORD_BYTES)
    return file.read(RECORD_BYTES)
