"""Votes that engines hold: skipped, made once too few, in another order, or from two threads.

A vote of a process group is a number at a position. What pairs with what is decided by how many
votes each rank has made before: one that is left out shifts all that follow, or stops everybody.
The rules: votes are unconditional, the same number on every rank whatever happens there, with a tag
that says what they are about, in a group of their own. Or there are no votes, but states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from l3store.consensus.values import Kind
from l3store.testing.consensus.field_rank import Way
from l3store.testing.consensus.field_script import Answer, Input, Script, each, submit
from l3store.testing.consensus.field_sees import (
    all_of,
    all_see,
    cannot_go_on,
    ranks_see,
    refuses,
)
from l3store.testing.consensus.field_stage import Told, play
from l3store.testing.consensus.naive_votes import OneGroup, Voting
from l3store.testing.consensus.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.testing.simulation.world import Outcome

__all__ = ["VOTES"]

VOTING = Way("votes by position", Voting)
ONE_GROUP = Way("two threads, one group", OneGroup)
OWN_ORDER = Way("votes in the order of arrival", Voting, leaders_order=False)


def _paired(group: str, *pair: str) -> Callable[[Outcome], bool]:
    """Returns a condition: these votes of the ranks were at one position."""
    return lambda outcome: isinstance(outcome, Told) and pair in outcome.pairs.get(group, ())


def _issue(step: int, number: int = 1) -> tuple[Input, ...]:
    return (Input(step, "issue"),) * number


ORDER_DEADLOCK = Script(
    inputs=_issue(8),
    durations={Kind.WRITE_THROUGH: ((0.004,), (0.1,))},
)
MIS_PAIR = Script(
    inputs=(*_issue(8), submit(8, "A", 512)),
    answers={("A", 0): (Answer(512, after=0.03), Answer(512, after=0.013))},
    durations={Kind.WRITE_THROUGH: ((0.004,), (0.2,))},
)
EARLY_EXIT = Script(
    inputs=(submit(8, "A", 384), submit(8, "B", 256)),
    answers={
        ("A", 0): (
            Answer(384, reads=((0.01, 128), (0.02, 256), (0.03, 384))),
            Answer(384, reads=((0.01, 128),)),
        ),
        ("B", 0): each(256, 256),
    },
)
ORDER_DIFFERS = Script(
    inputs=(
        submit(8, "A", 512, rank=0), submit(8, "B", 512, rank=0),
        submit(8, "B", 512, rank=1), submit(8, "A", 512, rank=1),
    ),
    answers={("A", 0): each(128, 256), ("B", 0): each(256, 512)},
)  # fmt: skip
TWO_THREADS = Script(
    inputs=(submit(8, "A", 1000), *_issue(8, 6)),
    answers={("A", 0): (Answer(1000, after=0.004), Answer(1000, after=0.013))},
    durations={Kind.WRITE_THROUGH: ((0.006,) * 5 + (0.1,), (0.004,) * 6)},
)

VOTES = (
    Scenario(
        name="order deadlock",
        source="field: order deadlock",
        goes_wrong="a vote is skipped where the local list is empty: one rank waits in it, the "
        "other in the next broadcast, until the group's timeout",
        script=play(ORDER_DEADLOCK),
        naive=VOTING,
        wrong=all_of(cannot_go_on(0, 1), ranks_see(consumed=({}, {}), error=("", ""))),
        right=all_see(consumed={"write_through": [0]}, pins=0),
    ),
    Scenario(
        name="silent mis-pair",
        source="field: silent mis-pair",
        goes_wrong="a skipped vote on writes pairs with the next vote, on a hit: rank 1 reads "
        "hit_len = 1, the peer's ack count, with no error",
        script=play(MIS_PAIR),
        naive=ONE_GROUP,
        wrong=all_of(
            _paired("all", "acks", "hit of 0"), ranks_see(granted=({"A": 1}, {"A": 1})),
            ranks_see(error=("", "")),
        ),
        right=all_see(
            granted={"A": 512}, settled={"A": 512}, consumed={"write_through": [0]}, pins=0
        ),
    ),
    Scenario(
        name="abort early exit",
        source="field: abort early exit",
        goes_wrong="a rank stops after ack 1 of 3: the peer's second vote on A pairs with one on B",
        script=play(EARLY_EXIT),
        naive=VOTING,
        wrong=all_of(
            _paired("io", "batch 1 of 0", "hit of 1"),
            ranks_see(settled=({"A": 256}, {"A": 128, "B": 256})),
            ranks_see(read=({"A": 384, "B": 256}, {"A": 128, "B": 256})),
        ),
        right=all_see(settled={"A": 128, "B": 256}, free=4096 - 384, held=0),
    ),
    Scenario(
        name="order of tickets differs",
        source="field: order of tickets differs",
        goes_wrong="ranks submit A, B and B, A: A = {128, 256}, B = {256, 128}, with no error",
        script=play(ORDER_DIFFERS),
        naive=OWN_ORDER,
        wrong=ranks_see(
            settled=({"A": 128, "B": 256}, {"A": 256, "B": 128}), error=("", "")
        ),
        right=all_see(settled={"A": 128, "B": 256}),
    ),
    Scenario(
        name="order of tickets differs and is not the leader's",
        source="field: order of tickets differs",
        goes_wrong="an engine that gives its ranks unequal inputs is not told so",
        script=play(replace(ORDER_DIFFERS, own_order=True)),
        naive=OWN_ORDER,
        wrong=ranks_see(
            settled=({"A": 128, "B": 256}, {"A": 256, "B": 128}), error=("", "")
        ),
        right=refuses("ticket 0", "rank 1", "another span"),
    ),
    Scenario(
        name="two threads, one group",
        source="field: two threads, one group",
        goes_wrong="the MIN of a hit pairs with the MIN of an ack count: hits of 6 and 5, not 1000",
        script=play(TWO_THREADS),
        naive=ONE_GROUP,
        wrong=all_of(
            _paired("all", "hit of 0", "acks"), ranks_see(granted=({"A": 6}, {"A": 5}))
        ),
        right=all_see(
            granted={"A": 1000}, settled={"A": 1000},
            consumed={"write_through": [0, 1, 2, 3, 4, 5]},
        ),
    ),
)  # fmt: skip
"""All of them."""
