"""Where the pages of a host pool lie in memory, and how they move.

Three ways, chosen once at attach:

- `InPlace`: the pool tells addresses (`get_page_buffer_meta`). They are affine in the page number,
  so three questions at attach give a table, and each later page costs a slice a segment. Segments
  stand in the order of the pool's flat page (all K, then all V), whatever the layout: pages written
  in place and through the flat page are the same bytes.
- `Copied`: the pool tells none; a page is copied from and into its flat page.
- neither: the pool is logical, it has no bytes (the anchor of DeepSeek V4).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from l3store.errors import ConfigError
from l3store.page import frame_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.abc import Segments
    from l3store.keys.shard import Cut

__all__ = ["Copied", "InPlace", "Kind", "Pages", "bytes_of", "cut_flat", "kind_of", "pages_of"]

Pieces = tuple[memoryview, ...]
"""The payload of one object in host memory."""

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@dataclass(frozen=True, slots=True)
class Kind:
    """How SGLang builds a host pool."""

    name: str
    cut: Cut
    paired: bool = False
    """Addresses come as K, V, K, V, ..."""
    rows: bool = False
    """A page is rows of tokens, whose order depends on the layout; else whole pages of layers."""


# By exact class: a subclass may hold other bytes (MXFP8 does).
_KINDS = {
    "MHATokenToKVPoolHost": Kind("mha", "tp", paired=True, rows=True),
    "AsymmetricMHATokenToKVPoolHost": Kind("mha", "tp", paired=True, rows=True),
    "MLATokenToKVPoolHost": Kind("mla", "replicated", rows=True),
    "DSAIndexerPoolHost": Kind("dsa_indexer", "replicated"),
    "MambaPoolHost": Kind("mamba", "tp"),
    "DeepSeekV4PagedHostPool": Kind("deepseek_v4_pages", "replicated"),
    "DeepSeekV4StateHostPool": Kind("deepseek_v4_states", "replicated"),
    "LogicalHostPool": Kind("logical", "replicated"),
}


def kind_of(name: str, pool: Any) -> Kind:
    """Returns what `pool` is.

    Raises:
        ConfigError: Its pages cannot be told apart from others, or moved; the message says why.
    """
    built = type(pool).__name__
    if getattr(pool, "stores_page_envelope", False):
        raise ConfigError(f"pool {name!r}: page envelopes hold several pools in one page")
    if built not in _KINDS:
        raise ConfigError(
            f"pool {name!r} is a {built}, whose pages L3Store cannot tell apart. "
            f"Supported: {', '.join(sorted(_KINDS))}"
        )
    layout = getattr(pool, "layout", None)
    if built != "LogicalHostPool" and layout not in _LAYOUTS:
        raise ConfigError(f"pool {name!r} has layout {layout!r}; supported: {', '.join(_LAYOUTS)}")
    return _KINDS[built]


class _Run(NamedTuple):
    """Segments that follow each other in a page and lie alike in memory."""

    memories: list[memoryview]
    """Of each segment, from its first page to its last."""
    stride: int
    """Bytes from one page to the next."""
    size: int


class Pages:
    """The pages of one host pool. Thread-safe, as long as each page is in one call at a time."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        # Keeps the memory alive: SGLang drops its buffers at exit while its threads still run.
        self._memory = [
            value for value in vars(pool).values() if isinstance(value, torch.Tensor | list | tuple)
        ]
        self.page_tokens: int = getattr(pool, "page_size", 1) or 1
        self.count: int = pool.size // self.page_tokens

    def numbers(self, host_indices: torch.Tensor | None, keys: int) -> list[int]:
        """Returns the page numbers behind token indices, ``keys * page_tokens`` of them.

        Raises:
            ValueError: Another number of indices, a page that is not aligned, or one outside.
        """
        found = 0 if host_indices is None else host_indices.numel()
        if found != keys * self.page_tokens:
            raise ValueError(f"{keys} pages of {self.page_tokens} tokens, but {found} indices")
        if not keys or host_indices is None:
            return []
        tokens = self.page_tokens
        starts: list[int] = host_indices[::tokens].tolist()
        if tokens > 1:
            if any([start % tokens for start in starts]):
                raise ValueError(f"host indices are not aligned to pages of {tokens} tokens")
            starts = [start // tokens for start in starts]
        if min(starts) < 0 or max(starts) >= self.count:
            raise ValueError(f"host page outside of the pool's {self.count}")
        return starts


class InPlace(Pages):
    """Pages whose bytes move from and into the host pool itself."""

    def __init__(self, pool: Any, kind: Kind, groups: int = 1) -> None:
        """Learns the table.

        Args:
            pool: A host pool that tells addresses.
            kind: What it is.
            groups: Objects that a page is cut into, by heads (layout page_head).

        Raises:
            ConfigError: Addresses are not affine in the page number.
        """
        super().__init__(pool)
        first, sizes = self._addresses(0, groups)
        second, _ = self._addresses(min(1, self.count - 1), groups)
        last, _ = self._addresses(self.count - 1, groups)
        strides = [b - a for a, b in zip(first, second, strict=True)]
        expected = [a + s * (self.count - 1) for a, s in zip(first, strides, strict=True)]
        if last != expected or any(s < size for s, size in zip(strides, sizes, strict=True)):
            raise ConfigError(f"the addresses of a {type(pool).__name__} are not affine")
        self.regions = _regions(first, strides, sizes, self.count)
        table = [
            (_within(self.regions, address, stride * (self.count - 1) + size), stride, size)
            for address, stride, size in zip(first, strides, sizes, strict=True)
        ]
        width = len(table) // groups
        parts = [table[i : i + width] for i in range(0, len(table), width)]
        self.object_bytes = sum(sizes[:width])
        """Payload bytes of an object."""
        if kind.paired:
            parts = [[*part[0::2], *part[1::2]] for part in parts]
        self._parts = [
            [
                _Run([memory for memory, *_ in alike], *shape)
                for shape, alike in groupby(part, key=itemgetter(1, 2))
            ]
            for part in parts
        ]

    def segment_bytes(self, part: int = 0) -> tuple[int, ...]:
        """Returns the bytes of each segment of an object."""
        return tuple(run.size for run in self._parts[part] for _ in run.memories)

    def framed(self, numbers: Sequence[int], part: int = 0) -> list[Segments]:
        """Returns one object of each page with room for its header: views of the pool, no copy."""
        columns = [column for run in self._parts[part] for column in _columns(run, numbers)]
        return frame_columns(columns, len(numbers))

    def _addresses(self, number: int, groups: int) -> tuple[list[int], list[int]]:
        tokens = self.page_tokens
        indices = torch.arange(number * tokens, (number + 1) * tokens, dtype=torch.int64)
        if groups > 1:
            return self._pool.get_split_heads_page_buffer_meta(indices, groups)  # type: ignore[no-any-return]
        return self._pool.get_page_buffer_meta(indices)  # type: ignore[no-any-return]


class Copied(Pages):
    """Pages that are copied from and into the flat pages that the host pool makes."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self.object_bytes = bytes_of(pool.get_dummy_flat_data_page()).nbytes
        """Payload bytes of a page, which is one object."""

    def segment_bytes(self, part: int = 0) -> tuple[int, ...]:
        """Returns the bytes of the one segment of a page."""
        return (self.object_bytes,)

    def taken(self, numbers: Sequence[int]) -> list[Pieces]:
        """Returns copies of these pages of the pool."""
        flat = [self._pool.get_data_page(number * self.page_tokens) for number in numbers]
        return [(bytes_of(page),) for page in flat]

    def blank(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Returns a flat page to read each of these pages into."""
        return [self._pool.get_dummy_flat_data_page() for _ in numbers]

    def put(self, numbers: Sequence[int], flat: Sequence[torch.Tensor], good: list[bool]) -> None:
        """Copies the good ones of `flat` into the pool."""
        for number, page, ok in zip(numbers, flat, good, strict=True):
            if ok:
                self._pool.set_from_flat_data_page(number * self.page_tokens, page)


def pages_of(name: str, pool: Any, kind: Kind, groups: int = 1) -> InPlace | Copied | None:
    """Returns how the pages of `pool` move; None for a logical pool.

    In place where it tells addresses that are affine in the page number, else copied.

    Raises:
        ConfigError: It tells neither addresses nor flat pages.
    """
    if kind.name == "logical":
        return None
    try:
        return InPlace(pool, kind, groups)
    except (ValueError, NotImplementedError):  # the pool's words for "not in this layout"
        if groups > 1:
            raise
    try:
        return Copied(pool)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"pool {name!r} gives no access to its pages: {error}") from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor: a view; a copy if it is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def cut_flat(flat: memoryview, groups: int) -> list[Pieces]:
    """Returns the objects of one flat page of the layout page_head: of each group K, then V."""
    if groups == 1:
        return [(flat,)]
    half = flat.nbytes // 2
    size = half // groups
    return [
        (flat[i * size : (i + 1) * size], flat[half + i * size : half + (i + 1) * size])
        for i in range(groups)
    ]


def _regions(
    first: Sequence[int], strides: Sequence[int], sizes: Sequence[int], count: int
) -> list[tuple[int, memoryview]]:
    """Returns the memory that a table covers, as few views as possible: (address, view)."""
    spans = sorted(
        (address, address + stride * (count - 1) + size)
        for address, stride, size in zip(first, strides, sizes, strict=True)
    )
    merged: list[list[int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [
        (start, memoryview((ctypes.c_ubyte * (end - start)).from_address(start)).cast("B"))
        for start, end in merged
    ]


def _within(regions: Sequence[tuple[int, memoryview]], address: int, size: int) -> memoryview:
    start, memory = next(region for region in reversed(regions) if region[0] <= address)
    return memory[address - start : address - start + size]


def _columns(run: _Run, numbers: Sequence[int]) -> list[list[memoryview]]:
    """Returns segment by segment that of each page: one slice a page serves all its segments."""
    memories, stride, size = run
    slices = [slice(at, at + size) for at in [number * stride for number in numbers]]
    return [[memory[cut] for cut in slices] for memory in memories]
