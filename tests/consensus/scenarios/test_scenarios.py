from __future__ import annotations

from l3store.consensus.collective import Collective
from l3store.testing.consensus.suite import ConsensusSuite
from l3store.testing.simulation.world import Policy


class TestBoth(ConsensusSuite):
    policies = (Policy("reports"), Policy("collective", Collective))
