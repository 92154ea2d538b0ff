"""The policies that runs can be asked for by name."""

from __future__ import annotations

from l3store.consensus.collective import Collective
from l3store.testing.simulation.broken import BROKEN
from l3store.testing.simulation.world import Policy

__all__ = ["POLICIES"]

_RIGHT = (Policy("reports"), Policy("collective", Collective))

POLICIES = {
    policy.name: policy for policy in (*_RIGHT, *(fault.policy for fault in BROKEN.values()))
}
"""By name."""
