"""Which pages of a place go first when room is needed.

A policy sees slot numbers and their parents' slot numbers, and no bytes. Parents leave after their
children, so what is left of a chain is always its beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.backends.nvme.eviction_lru import LeafLRU
from l3store.backends.nvme.eviction_policy import NONE, Policy
from l3store.backends.nvme.eviction_sweep import FamilySweep

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DEFAULT", "NONE", "POLICIES", "FamilySweep", "LeafLRU", "Policy"]

POLICIES: dict[str, Callable[[], Policy]] = {"lru": LeafLRU, "sweep": FamilySweep}
"""By the value of the option ``evict``."""
DEFAULT = "sweep"
"""The better one: docs/backends/nvme-eviction.md."""
