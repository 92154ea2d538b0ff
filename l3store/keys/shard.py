"""Shards: this rank's own rectangle of a page, named by which part of how many.

Layer range and heads are deliberately not in the name: as an adapter can see them they give
different contents one name (kv heads replicated when tp > heads, hybrid models whose every stage
says layers 0-4, packed draft layers, DCP). `l3store.testing.topology` enumerates that. Which layers
part r of n has follows from how the stages are cut: that is `Descriptor.stages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from l3store.errors import ConfigError

__all__ = ["Coordinate", "Cut", "head_group_shards", "is_writer", "shard_name"]

Cut = Literal["tp", "replicated"]
"""How tensor parallelism treats a pool: cut (MHA/GQA kv, swa, mamba, MHA draft) or
replicated (MLA kv, indexer, MLA draft)."""

WHOLE = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """Where a rank stands. dp never appears: replicas share their pages.

    `dcp` (decode context parallel) lies inside tensor parallelism and interleaves token positions:
    the ranks with equal ``tp % dcp_size`` hold the same positions. A pool that is whole on all of
    them (indexer, mamba) has dcp_size 1.

    `tp` counts the ranks of one cp rank. SGLang without DP attention tells a TP rank that is
    counted over the cp ranks (``cp * tp_size + tp``): taken as it is, only cp 0 has a writer.
    """

    pp: int = 0
    pp_size: int = 1
    cp: int = 0
    cp_size: int = 1
    tp: int = 0
    tp_size: int = 1
    dcp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "cp", "tp"):
            rank, size = getattr(self, name), getattr(self, f"{name}_size")
            if not 0 <= rank < size:
                raise ConfigError(f"{name} rank {rank} is not below {name}_size {size}")
        if self.dcp_size < 1 or self.tp_size % self.dcp_size:
            raise ConfigError(f"dcp_size {self.dcp_size} does not divide tp_size {self.tp_size}")

    @property
    def dcp(self) -> int:
        """Which token positions this rank holds."""
        return self.tp % self.dcp_size


def shard_name(at: Coordinate, cut: Cut) -> str:
    """Returns the shard of a pool on this rank, for example ``P0of2-T3of4`` or ``all``."""
    return _join(at, f"T{at.tp}of{at.tp_size}" if cut == "tp" and at.tp_size > 1 else None)


def head_group_shards(at: Coordinate, groups: int) -> list[str]:
    """Returns the shards of a TP-cut pool whose pages are split into declared head groups.

    A page is then ``groups / tp_size`` objects on each rank, and deployments of different TP sizes
    that declare the same `groups` share their bytes (layout page_head only).

    Raises:
        ConfigError: `groups` is not a multiple of tp_size, or decode context parallelism is on.
    """
    if groups < 1 or groups % at.tp_size:
        raise ConfigError(f"head_groups {groups} is not a multiple of tp_size {at.tp_size}")
    if at.dcp_size > 1:
        raise ConfigError("head_groups cannot be combined with decode context parallelism")
    mine = groups // at.tp_size
    first = at.tp * mine
    return [_join(at, f"G{i}of{groups}") for i in range(first, first + mine)]


def is_writer(at: Coordinate, cut: Cut) -> bool:
    """Returns whether this rank is the one writer of its shard.

    TP-cut pools: every rank. Replicated pools: the first TP rank of each (pp, cp, dcp) shard.
    """
    return cut == "tp" or at.tp < at.dcp_size


def _join(at: Coordinate, tensor: str | None) -> str:
    parts = [
        f"P{at.pp}of{at.pp_size}" if at.pp_size > 1 else None,
        f"C{at.cp}of{at.cp_size}" if at.cp_size > 1 else None,
        tensor,
        f"D{at.dcp}of{at.dcp_size}" if at.dcp_size > 1 else None,
    ]
    return "-".join(part for part in parts if part) or WHOLE
