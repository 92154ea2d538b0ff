from __future__ import annotations

from l3store.testing.consensus.suite import ConsensusSuite
from l3store.testing.simulation.world import Policy


class TestReports(ConsensusSuite):
    policies = (Policy("reports"),)
