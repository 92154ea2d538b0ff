"""Deliberate faults in the protocol's code: what its rules are for, one by one.

Each is the protocol with one rule taken out. The mutation check searches seeds for each until it
is found; the scenarios show what goes wrong without the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from l3store.consensus.meeting import Meeting
from l3store.consensus.member import Member
from l3store.consensus.protocol import Machine
from l3store.consensus.reports import Reports
from l3store.consensus.table import FactTable
from l3store.testing.simulation.engine import Engine
from l3store.testing.simulation.storage import Storage
from l3store.testing.simulation.world import Policy

if TYPE_CHECKING:
    from l3store.consensus.values import Facts

__all__ = ["BROKEN", "Broken"]


@dataclass(frozen=True, slots=True)
class Broken:
    """One rule taken out.

    Attributes:
        rule: What was taken out, in a few words.
        history: Number in CONSENSUS.md's list of histories, or 0.
    """

    policy: Policy
    rule: str
    history: int = 0


def _broken(
    name: str,
    rule: str,
    history: int = 0,
    *,
    table: type[FactTable] = FactTable,
    meeting: type[Meeting] = Meeting,
    machine: type[Machine] = Machine,
    storage: type[Storage] = Storage,
    engine: type[Engine] = Engine,
) -> Broken:
    class BrokenReports(Reports):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.facts = table(self.config, self.rank, self._incarnation)
            if self._meeting is not None:
                self._meeting = meeting(self.config, self._incarnation)

    class BrokenMember(Member):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.machine = machine(self.machine.config, self.machine._ledger)

    class BrokenEngine(engine):  # type: ignore[misc, valid-type]
        member_type = BrokenMember

    return Broken(Policy(name, BrokenReports, storage, BrokenEngine), rule, history)


class _NewestByArrival(Meeting):
    def hear(self, facts: Facts) -> bool:
        self._heard[facts.rank].facts = None
        return super().hear(facts)


BROKEN = (
    _broken("arrival", "the report that arrived last counts, not the newest", 7,
            meeting=_NewestByArrival),
)  # fmt: skip
"""All of them."""
