"""`ConsensusSuite`: every scenario, as tests to inherit by whoever has an agreement of its own.

An engine whose ranks agree in another way writes that way as an `Agreement`: the facts of all ranks
go in, the same record comes out on every rank. Say its ranks tell their facts with every batch:

    from l3store.consensus.agreement import Agreement
    from l3store.consensus.wire import decode_facts, encode_facts
    from l3store.testing.consensus.suite import ConsensusSuite
    from l3store.testing.simulation.world import Policy

    class WithBatches(Agreement):
        def pump(self):  # a turn of whoever sends; returns seconds until the next one
            self._link.report(encode_facts(self.facts.facts()))
            return self.config.interval_s

        def _start(self): ...  # begin to take turns; the simulation takes them itself

        def _hear(self, meeting):
            meeting.hear(self.facts.facts())
            for frame in self._link.reports().values():
                meeting.hear(decode_facts(frame))

    class TestWithBatches(ConsensusSuite):
        policies = (Policy("with batches", agreement=WithBatches),)

Run pytest on it. Each scenario runs in virtual time, in some 10 ms: once under its naive policy,
where the stated wrong result must appear (or the scenario would prove nothing), and once under each
of the class's policies, where the stated right one must. The link is a `LocalLink`, which loses,
delays and doubles what goes through `report`; records always come, in order. A `Policy` may also
name an engine and a storage of one's own, subclasses of the simulation's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from l3store.testing.consensus.field import FIELD
from l3store.testing.consensus.histories import HISTORIES
from l3store.testing.simulation.search import describe

if TYPE_CHECKING:
    import pytest

    from l3store.testing.consensus.scenario import Scenario
    from l3store.testing.simulation.world import Outcome, Policy

__all__ = ["SCENARIOS", "ConsensusSuite"]

SCENARIOS = (*HISTORIES, *FIELD)
"""Every scenario, the histories first."""


class ConsensusSuite:
    """All tests; a subclass says which policies must hold."""

    policies: ClassVar[tuple[Policy, ...]] = ()
    scenarios: ClassVar[tuple[Scenario, ...]] = SCENARIOS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Makes one test of each scenario, and of each policy for the right ones."""
        if "scenario" in metafunc.fixturenames:
            names = [each.name.replace(" ", "-") for each in self.scenarios]
            metafunc.parametrize("scenario", self.scenarios, ids=names)
        if "policy" in metafunc.fixturenames:
            metafunc.parametrize("policy", self.policies, ids=[each.name for each in self.policies])

    def test_a_naive_group_gets_it_wrong(self, scenario: Scenario) -> None:
        """The stated wrong result appears without the rule."""
        outcome = scenario.play(scenario.naive)
        went_wrong = scenario.wrong(outcome)
        assert went_wrong, _say(scenario, scenario.naive, outcome)

    def test_it_holds(self, scenario: Scenario, policy: Policy) -> None:
        """The stated right result appears, and nothing else is wrong."""
        outcome = scenario.play(policy)
        holds = scenario.right(outcome)
        assert holds, _say(scenario, policy, outcome)

    def test_there_is_a_policy_that_must_hold(self) -> None:
        """A class without one would test nothing."""
        assert self.policies, f"{type(self).__name__}.policies is empty: name what must hold"


def _say(scenario: Scenario, policy: Policy, outcome: Outcome) -> str:
    """Returns what a failed test prints."""
    ends = [f"rank {rank}: {end}" for rank, end in enumerate(outcome.ranks)]
    told = f"{scenario.source}, {scenario.name}: {scenario.goes_wrong}"
    return "\n".join([told, describe(outcome, policy, again=False), *ends])
