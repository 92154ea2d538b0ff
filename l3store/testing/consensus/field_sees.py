"""Conditions on what the ranks of a scenario of the field saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.testing.consensus.field_stage import Told

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from l3store.testing.consensus.field_rank import Seen
    from l3store.testing.simulation.world import Outcome

    Condition: TypeAlias = Callable[[Outcome], bool]

__all__ = ["all_of", "all_see", "cannot_go_on", "dies", "every", "ranks_see", "refuses"]


def all_see(**fields: object) -> Condition:
    """Returns a condition: nothing went wrong, and every rank has these fields of `Seen`."""
    return lambda outcome: (
        _well(outcome)
        and all(
            getattr(seen, name) == value
            for name, value in fields.items()
            for seen in _seen(outcome)
        )
    )


def every(condition: Callable[[Seen], bool]) -> Condition:
    """Returns a condition: nothing went wrong, and this is true of what every rank saw."""
    return lambda outcome: _well(outcome) and all(map(condition, _seen(outcome)))


def ranks_see(**fields: tuple[object, ...]) -> Condition:
    """Returns a condition: rank by rank they saw this, whatever else went wrong."""
    return lambda outcome: all(
        getattr(seen, name) == value
        for name, values in fields.items()
        for seen, value in zip(_seen(outcome), values, strict=True)
    )


def cannot_go_on(*ranks: int) -> Condition:
    """Returns a condition: these ranks wait for ever, and have no error."""
    return lambda outcome: isinstance(outcome, Told) and tuple(outcome.hangs) == ranks


def dies(rank: int, words: str) -> Condition:
    """Returns a condition: this rank ended with such an exception."""
    return lambda outcome: words in _seen(outcome)[rank].error


def refuses(*words: str) -> Condition:
    """Returns a condition: the group ended with a ConsensusError that says all of this."""
    return lambda outcome: bool(outcome.refused) and all(each in outcome.refused for each in words)


def all_of(*conditions: Condition) -> Condition:
    """Returns a condition: all of these are true."""
    return lambda outcome: all(condition(outcome) for condition in conditions)


def _well(outcome: Outcome) -> bool:
    return not outcome.violations and not outcome.refused


def _seen(outcome: Outcome) -> list[Seen]:
    if not isinstance(outcome, Told):
        raise TypeError(f"{outcome!r} was not told by a script of the field")
    return outcome.seen
