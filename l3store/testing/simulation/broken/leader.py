"""Faults of the leader: how it takes reports in, and how it meets them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.consensus.meeting import Meeting
from l3store.testing.simulation.broken.base import broken

if TYPE_CHECKING:
    from l3store.consensus.values import Facts

__all__ = ["LEADER"]


class _NewestByArrival(Meeting):
    def hear(self, facts: Facts) -> bool:
        self._heard[facts.rank].facts = None
        return super().hear(facts)


LEADER = (
    broken("arrival", "the report that arrived last counts, not the newest", 7,
           meeting=_NewestByArrival),
)  # fmt: skip
"""All of them."""
