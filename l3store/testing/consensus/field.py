"""Classes of failures seen in the field, each as a scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from l3store.testing.consensus.scenario import Scenario

__all__ = ["FIELD"]

FIELD: tuple[Scenario, ...] = ()
"""All of them."""
