"""What a deliberate fault is: the protocol with one rule taken out, as a policy to run."""

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
    from l3store.consensus.agreement import Agreement

__all__ = ["Broken", "broken"]


@dataclass(frozen=True, slots=True)
class Broken:
    """One rule taken out.

    Attributes:
        policy: What to run.
        rule: What is done in place of the rule, in a few words.
        history: Number of the history in docs/consensus.md that needs the rule, or 0.
    """

    policy: Policy
    rule: str
    history: int = 0

    @property
    def name(self) -> str:
        """Of the policy."""
        return self.policy.name


def broken(
    name: str,
    rule: str,
    history: int = 0,
    *,
    reports: type[Reports] = Reports,
    table: type[FactTable] = FactTable,
    meeting: type[Meeting] = Meeting,
    machine: type[Machine] = Machine,
    member: type[Member] = Member,
    storage: type[Storage] = Storage,
    engine: type[Engine] = Engine,
) -> Broken:
    """Returns a fault: the real classes, but for those that are given."""

    class BrokenReports(reports):  # type: ignore[misc, valid-type]
        _table = table
        _meeting: Meeting | None

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if self._meeting is not None:
                self._meeting = meeting(self.config, self._incarnation)

    class BrokenMember(member):  # type: ignore[misc, valid-type]
        def __init__(self, agreement: Agreement, ledger: Any) -> None:
            super().__init__(agreement, ledger)
            self.machine = machine(agreement.config, ledger)

    class BrokenEngine(engine):  # type: ignore[misc, valid-type]
        member_type = BrokenMember

    return Broken(Policy(name, BrokenReports, storage, BrokenEngine), rule, history)
