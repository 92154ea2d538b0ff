"""Options of ``nvme://``, and the sizes that follow from them."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from l3store.backends.nvme.eviction import DEFAULT, POLICIES
from l3store.config import Duration, Size
from l3store.errors import ConfigError, nearest

__all__ = ["NvmeOptions", "check_sizes", "sizes"]

_DEFAULT_CAPACITY = 16 << 30
_LEAST_SEGMENT, _SMALLEST, _LARGEST = 16 << 10, 16 << 20, 1 << 30
_SEGMENTS, _LEAST_SEGMENTS, _MOST_SEGMENTS = 64, 4, 1_000_000
_ALIGN = 4096


class NvmeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``nvme://``."""

    capacity: Size = Size(0)
    """Bytes of all segment files, rounded down to whole segments; 0: what the store was made with,
    and 16 GiB for a new one."""
    segment: Size = Size(0)
    """Bytes of a segment; 0: what the store was made with, and capacity / 64 between 16 MiB and
    1 GiB for a new one."""
    writers: int = 1
    """Processes that write: each is sure of its share of the segments."""
    io: Literal["direct", "page"] = "direct"
    """``direct`` moves pages past the page cache; ``page`` through it."""
    durability: Literal["none", "batch", "interval"] = "none"
    """What a power cut may take: all that the drive had not got yet, nothing that was acknowledged,
    or the last `sync_interval`. No kill of a process takes anything."""
    sync_interval: Duration = Duration(1.0)
    """Seconds between two syncs of ``durability=interval``."""
    evict: str = DEFAULT
    """The order in which pages go when room is needed; ``none``: a full store takes no more."""
    workers: int = 0
    """Threads that move pages; 0: one a core, 2 to 4."""
    scrub_rate: Size = Size(256 << 20)
    """Bytes a second that are checked in the background after a power cut; 0: only what is read."""
    mode: Literal["rw", "ro"] = "rw"
    """``ro`` creates and changes nothing."""

    @property
    def threads(self) -> int:
        """How many threads move pages: more than cores costs each page, and speeds up none."""
        return self.workers or min(4, max(2, len(os.sched_getaffinity(0))))

    def __post_init__(self) -> None:
        for name in ("writers", "sync_interval"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"option {name!r} must be positive, not {getattr(self, name)}")
        if self.workers < 0:
            raise ConfigError(
                f"option 'workers' must be positive, or 0 for one a core, not {self.workers}"
            )
        policies = {*POLICIES, "none"}
        if self.evict not in policies:
            raise ConfigError(
                f"option 'evict' = {self.evict!r} is not one of its values"
                f"{nearest(self.evict, policies)}"
            )
        if self.segment and (self.segment < _LEAST_SEGMENT or self.segment % _ALIGN):
            near = max(_LEAST_SEGMENT, round(self.segment / _ALIGN) * _ALIGN)
            raise ConfigError(
                f"option 'segment': {self.segment} bytes; it must be a multiple of {_ALIGN} and at "
                f"least {_LEAST_SEGMENT}; the nearest is {near}"
            )


def sizes(options: NvmeOptions) -> dict[str, int]:
    """Returns the settings of a new store: bytes of a segment, and how many there may be.

    Raises:
        ConfigError: The capacity is less than four segments; the message names the least.
    """
    capacity = int(options.capacity) or _DEFAULT_CAPACITY
    size = int(options.segment)
    if not size:
        size = min(max(capacity // _SEGMENTS, _SMALLEST), _LARGEST) // _ALIGN * _ALIGN
    if capacity < _LEAST_SEGMENTS * size:
        raise ConfigError(
            f"option 'capacity': {capacity} bytes are less than four segments of {size} bytes; "
            f"the least is {_LEAST_SEGMENTS * size}, or less with a smaller option 'segment'"
        )
    check_sizes(size, capacity // size, "options 'capacity' and 'segment'")
    return {"segment_bytes": size, "segments": capacity // size}


def check_sizes(size: int, segments: int, where: str) -> None:
    """Checks what `where` says: so many segments of that many bytes.

    Raises:
        ConfigError: No store can be like that.
    """
    well = size >= _LEAST_SEGMENT and size % _ALIGN == 0
    if not (well and _LEAST_SEGMENTS <= segments <= _MOST_SEGMENTS):
        raise ConfigError(
            f"{where}: {segments} segments of {size} bytes; a store has {_LEAST_SEGMENTS} to "
            f"{_MOST_SEGMENTS} segments of {_LEAST_SEGMENT} bytes or more, a multiple of {_ALIGN}"
        )
