"""Faults of whoever holds host pages: the engine, its host memory and its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.testing.simulation.broken.base import broken
from l3store.testing.simulation.engine import Engine

if TYPE_CHECKING:
    from l3store.consensus.values import Settle

__all__ = ["PAGES"]


class _ReleasesAlone(Engine):
    def _settle(self, effect: Settle) -> None:
        super()._settle(effect)
        if effect.granted:
            reserved = self.host.tickets[effect.ticket]
            for slot in [slot for slot in reserved.slots if not self.storage.busy(slot)]:
                reserved.slots.remove(slot)
                self.host.give(slot)


PAGES = (
    broken("alone", "each rank frees the pages that no call of its own is in", 1,
           engine=_ReleasesAlone),
)  # fmt: skip
"""All of them."""
