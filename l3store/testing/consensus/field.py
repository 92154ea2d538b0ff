"""Classes of failures seen in the field, each as a scenario: what engines do, and what holds.

An engineer who met one finds it by its words: ``pop from empty list``, a rank that reads
``hit_len = 1``, all ranks in a collective and none of them the same one, memory of the leader that
grows while idle. The sources of the scenarios are the names of the classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.testing.consensus.field_operations import OPERATIONS
from l3store.testing.consensus.field_pages import PAGES
from l3store.testing.consensus.field_values import VALUES
from l3store.testing.consensus.field_votes import VOTES

if TYPE_CHECKING:
    from l3store.testing.consensus.scenario import Scenario

__all__ = ["FIELD"]

FIELD: tuple[Scenario, ...] = (*VALUES, *VOTES, *PAGES, *OPERATIONS)
"""All of them."""
