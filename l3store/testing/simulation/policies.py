"""The policies that runs can be asked for by name."""

from __future__ import annotations

from l3store.testing.simulation.broken import BROKEN
from l3store.testing.simulation.world import Policy

__all__ = ["POLICIES"]

POLICIES = {
    policy.name: policy
    for policy in (Policy("reports"), *(fault.policy for fault in BROKEN.values()))
}
"""By name."""
