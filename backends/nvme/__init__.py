"""``nvme:///mnt/nvme0/l3``: slabs on a local drive, shared by all processes of a machine.

    store.json               kind, format, bytes of a segment, number of segments
    meta/<name>              descriptors
    tmp/                     files on their way to a rename
    writers/                 who writes (members), and what they tell each other (journal)
    seg-NNNNNN               a segment: pages of one place (format, segment)

A process knows what is stored by its `catalog` (an `index`), which reads all slot tables at the
start and all journals from then on. What it writes itself lies on `shelf`s, one a place, whose free
slots are `space` and whose order of `eviction` is a policy. Over them, each on the one before:
`holdings` (in whose use slots are), `growth` (how segments come and go), `estate` (room, and pages
that come and go). `reader` and `filler` move batches (`moving`, `bounce`); the `keeper` does
what is due when nobody calls.
docs/backends/nvme.md tells the format, sizing, durability and what happens in failures.
"""

from __future__ import annotations

from l3store.backends.nvme.backend import NvmeBackend
from l3store.backends.nvme.options import NvmeOptions

__all__ = ["NvmeBackend", "NvmeOptions"]
