"""One thing that goes wrong in a group of ranks: how it comes about, and what shows that it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from l3store.testing.simulation.plan import Plan
from l3store.testing.simulation.world import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.testing.simulation.world import Outcome, Policy

__all__ = ["Scenario", "all_back", "both", "holds", "settled", "violated"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A script for a group, which a naive group gets wrong and a good one right.

    Ranks, stores, links and script are the same for both: only the policy object differs.

    Attributes:
        name: A few words, the test's name.
        source: Where it is told: ``history 7``, or a class of failures in the field.
        goes_wrong: What happens to a naive group, in a sentence.
        script: What happens: a plan that was written by hand, or a function that plays it with
            the code of a policy.
        naive: The policy without the rule.
        wrong: Whether an outcome is the stated wrong one.
        right: Whether an outcome is the stated right one.
    """

    name: str
    source: str
    goes_wrong: str
    script: Plan | Callable[[Policy], Outcome]
    naive: Policy
    wrong: Callable[[Outcome], bool]
    right: Callable[[Outcome], bool]

    def play(self, policy: Policy) -> Outcome:
        """Returns how the script ends with the code of a policy."""
        if isinstance(self.script, Plan):
            return run(self.script, policy, to_the_end=True)
        return self.script(policy)


# -- what `wrong` and `right` are made of ---------------------------------------------------------


def violated(*words: str) -> Callable[[Outcome], bool]:
    """Returns a condition: the run did what must never happen, in one of these words."""
    return lambda outcome: any(word in text for text in outcome.violations for word in words)


def holds(outcome: Outcome) -> bool:
    """Whether nothing went wrong: the run ended by itself, and every check of it was met."""
    return not outcome.violations and not outcome.refused


def settled(request: str, pages: int, *reasons: str) -> Callable[[Outcome], bool]:
    """Returns a condition: nothing went wrong, and a ticket settled so on every rank.

    Args:
        request: Name of the request in the plan.
        pages: That every rank settled.
        reasons: As in `Settle.reason`; none: any.
    """

    def condition(outcome: Outcome) -> bool:
        ends = [
            [(got, why) for name, got, why in rank.settled if name == request]
            for rank in outcome.ranks
        ]
        alike = all(end == ends[0] for end in ends) and len(ends[0]) == 1
        return holds(outcome) and alike and _is(ends[0][0], pages, reasons)

    return condition


def all_back(outcome: Outcome) -> bool:
    """Whether every rank has every host page free or in its tree, and holds no ticket."""
    return all(
        rank.free + rank.cached == outcome.plan.capacity and not rank.open and not rank.occupancy
        for rank in outcome.ranks
    )


def both(*conditions: Callable[[Outcome], bool]) -> Callable[[Outcome], bool]:
    """Returns a condition: all of these are true."""
    return lambda outcome: all(condition(outcome) for condition in conditions)


def _is(end: tuple[int, str], pages: int, reasons: tuple[str, ...]) -> bool:
    return end[0] == pages and (not reasons or end[1] in reasons)
