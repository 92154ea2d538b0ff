"""Deliberate faults in the protocol's code: what its rules are for, one by one.

Each is the protocol with one rule taken out, a small subclass of the class that keeps it. The
mutation check searches seeds for each until it is found; the scenarios show what goes wrong.
"""

from __future__ import annotations

from l3store.testing.simulation.broken.ballots import BALLOTS
from l3store.testing.simulation.broken.base import Broken
from l3store.testing.simulation.broken.decisions import DECISIONS
from l3store.testing.simulation.broken.facts import FACTS
from l3store.testing.simulation.broken.leader import LEADER
from l3store.testing.simulation.broken.pages import PAGES

__all__ = ["BROKEN", "Broken"]

BROKEN = {fault.name: fault for fault in (*LEADER, *FACTS, *DECISIONS, *PAGES, *BALLOTS)}
"""All of them, by name."""
