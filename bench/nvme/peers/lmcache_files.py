"""LMCache's raw_block (io_uring) and fs_native.

raw_block registers the pages' memory with io_uring, and lies in a file that was written once, as a
raw device would be: its writes meet no allocation.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lmcache_l2 import serve_adapter  # first: it sets what LMCache reads when it is imported

# isort: split
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.raw_block_l2_adapter import RawBlockL2AdapterConfig

if TYPE_CHECKING:
    import argparse

_META_BYTES = 64 << 20
_HEADER_BYTES = 4096


def _config(given: argparse.Namespace) -> Any:
    if given.kind == "fs_native":
        return FSNativeL2AdapterConfig.from_dict({"base_path": given.dir, "num_workers": 4})
    slot = given.page_bytes + _HEADER_BYTES
    path = os.path.join(given.dir, "device")
    left = size = _META_BYTES + slot * given.pages
    with open(path, "wb", buffering=0) as device:
        zeros = bytes(1 << 20)
        while left > 0:
            left -= device.write(zeros[:left])
        os.fsync(device.fileno())
        os.posix_fadvise(device.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return RawBlockL2AdapterConfig.from_dict({
        "device_path": path, "slot_bytes": slot, "capacity_bytes": size,
        "meta_total_bytes": _META_BYTES, "io_engine": "io_uring", "use_odirect": True,
    })  # fmt: skip


if __name__ == "__main__":
    serve_adapter(_config)
