"""Pages that one rank holds, frees or evicts by itself: memory, calls that hang, attempts, clocks.

The rules: reserve, MIN, commit or give back; pages under a call that has not returned stay out on
all ranks; what was aborted is remembered; victims are chosen by a logical counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.consensus.local import Timeline
from l3store.testing.consensus.field_rank import Seen, Way, way_of
from l3store.testing.consensus.field_script import NEVER, Answer, Input, Script, each, submit
from l3store.testing.consensus.field_sees import all_of, all_see, every, ranks_see
from l3store.testing.consensus.field_stage import Told, play
from l3store.testing.consensus.naive_calls import (
    ByRequest,
    ForgetfulMember,
    KvAlone,
    MinOfEnds,
    NoDeadline,
    NoReserve,
    ReleasedAlone,
    WallClockTree,
)
from l3store.testing.consensus.naive_votes import Alone, Voting
from l3store.testing.consensus.scenario import Scenario
from l3store.testing.simulation.broken import BROKEN
from l3store.testing.simulation.plan import Plan

if TYPE_CHECKING:
    from l3store.testing.simulation.world import Outcome, Policy

__all__ = ["PAGES"]

DEADLINE_S = 0.2
STEPS_S = 0.05
"""What steps and frames may add to a deadline."""

NO_DEADLINE = Way("votes without a deadline", Voting, calls=NoDeadline)
NO_ROOM = Script(
    inputs=(submit(8, "A", 896),), answers={("A", 0): (Answer(896), Answer(896, fits=False))}
)
LESS_MEMORY = Script(
    inputs=(submit(8, "A", 896),), answers={("A", 0): each(896, 896)}, capacity=(1000, 500)
)
QUERY_HANGS = Script(
    inputs=(submit(8, "A", 896),),
    answers={("A", 0): (Answer(896), Answer(896, after=NEVER))},
    steps=80,
)
READ_HANGS = Script(
    # B comes while A's pages are out, C when they are back.
    inputs=(submit(8, "A", 896), submit(50, "B", 896), submit(130, "C", 800)),
    answers={
        ("A", 0): (Answer(896), Answer(896, reads=((0.01, 128),), hangs_s=1.0)),
        ("B", 0): each(896, 896),
        ("C", 0): each(800, 800),
    },
    capacity=(1000,),
    steps=160,
)
SECOND_ATTEMPT = Script(
    inputs=(submit(8, "A", 896), Input(14, "abort", "A"), submit(15, "A", 896, attempt=1)),
    answers={
        ("A", 0): (Answer(896, reads=((0.15, 300),)),) * 2,
        ("A", 1): (Answer(896, reads=((0.3, 100),)),) * 2,
    },
    steps=80,
)
CANCEL = Script(
    inputs=(Input(8, "abort", "A"), submit(9, "A", 300)),
    answers={("A", 0): (Answer(300, reads=((0.01, 100), (9.0, 300))),) * 2},
)


CANCEL_AT_ONCE = Script(
    inputs=(submit(8, "A", 896), Input(8, "abort", "A"), submit(20, "B", 896)),
    answers={("A", 0): each(896, 896), ("B", 0): each(896, 896)},
    options={"occupancy_pages": 1000},
)


def _sidecar(rule: str, kv: int, *stored: int | frozenset[int]) -> Script:
    """A pool beside kv, of which each rank has what is said."""
    return Script(
        inputs=(submit(8, "A", 10, sidecars=(("indexer", rule),)),),
        answers={("A", 0): tuple(Answer(kv, pools={"indexer": each}) for each in stored)},
    )


def _victims(policy: Policy) -> Outcome:
    """Two ranks touch pages 1 and 2 in the same order, and need one host page.

    The ranks' clocks have a resolution of 1 us; between the two touches 0.4 us pass, in which one
    of them ticks.
    """
    told = Told(Plan(1, Script().config(), ()))
    for rank, offset in enumerate((0.1e-6, 0.7e-6)):
        time = Timeline(1)
        time.now = offset
        tree = way_of(policy).tree(2, lambda time=time: int(time.now * 1e6) / 1e6)  # type: ignore[misc]
        for page in (1, 2):
            tree.insert(page, tree.free.pop(0), None)
        time.now += 5e-6
        tree.match([2])
        time.now += 0.4e-6
        tree.match([1])
        tree.allocate(1)
        victims = sorted({1, 2} - set(tree.nodes))
        told.seen.append(Seen(rank, value=victims))
    return told


PAGES = (
    Scenario(
        name="LRU clock",
        source="field: LRU clock",
        goes_wrong="stamps of wall clocks differ by microseconds: ranks evict different pages",
        script=_victims,
        naive=Way("stamps of a wall clock", tree=WallClockTree),
        wrong=ranks_see(value=([1], [2])),
        right=all_see(value=[2]),
    ),
    Scenario(
        name="allocation on one rank",
        source="field: allocation on one rank",
        goes_wrong="memory fits on one rank only: {fits, does not} is scheduled as {yes, no}",
        script=play(NO_ROOM),
        naive=Way("memory after the vote", Alone, calls=NoReserve),
        wrong=ranks_see(settled=({"A": 896}, {"A": 0}), memory=(4096 - 896, 4096)),
        right=all_see(granted={}, settled={"A": 0}, free=4096, memory=4096, held=0),
    ),
    Scenario(
        name="allocation with less memory on one rank",
        source="field: allocation on one rank",
        goes_wrong="a prefetch of 896 pages fits into the 1000 of one rank, not the 500 of another",
        script=play(LESS_MEMORY),
        naive=Way("own capacity", Alone, calls=NoReserve, shared_capacity=False),
        wrong=ranks_see(settled=({"A": 896}, {"A": 0})),
        right=all_of(
            all_see(granted={}, settled={"A": 0}, free=500, held=0),
            ranks_see(memory=(1000, 500)),
        ),
    ),
    Scenario(
        name="outage as a hang",
        source="field: outage as a hang",
        goes_wrong="a query never returns: its vote never comes, and no rank gets on with A",
        script=play(QUERY_HANGS),
        naive=NO_DEADLINE,
        wrong=all_see(settled={}, granted={}, held=896),
        right=all_of(
            all_see(granted={}, settled={"A": 0}, free=4096, held=0),
            every(lambda seen: seen.settled_s["A"] < DEADLINE_S + STEPS_S),
        ),
    ),
    Scenario(
        name="outage as a hang of a read",
        source="field: outage as a hang",
        goes_wrong="a read is given up at its deadline, and its pages are used again under it",
        script=play(READ_HANGS),
        naive=Way("pages back at the deadline", calls=ReleasedAlone),
        wrong=all_of(
            ranks_see(reused=(False, True)),
            every(lambda seen: seen.released_s["A"] < 1.0),
            all_see(settled={"A": 128, "B": 0, "C": 800}),
        ),
        right=all_of(
            all_see(
                reused=False, settled={"A": 128, "B": 0, "C": 800}, held=0, free=1000 - 128 - 800
            ),
            every(lambda seen: seen.settled_s["A"] < DEADLINE_S + STEPS_S),
            every(lambda seen: 1.0 <= seen.released_s["A"] < 1.0 + STEPS_S),
        ),
    ),
    Scenario(
        name="sidecar shorter",
        source="field: sidecar shorter",
        goes_wrong="kv has 10 pages and the indexer 7: 10 are used",
        script=play(_sidecar("all_pages", 10, 7, 10)),
        naive=Way("kv alone", calls=KvAlone),
        wrong=all_see(settled={"A": 10}),
        right=all_see(granted={"A": 7}, settled={"A": 7}),
    ),
    Scenario(
        name="sidecar with unequal end points",
        source="field: sidecar shorter",
        goes_wrong="end points {1, 3} and {1, 2} are met by MIN: 2, which is none of rank 0",
        script=play(_sidecar("trailing_pages", 10, frozenset({1, 3}), frozenset({1, 2}))),
        naive=Way("the MIN of the last end points", calls=MinOfEnds),
        wrong=all_see(settled={"A": 2}),
        right=all_see(granted={"A": 1}, settled={"A": 1}),
    ),
    Scenario(
        name="sidecar with no common end point",
        source="field: sidecar shorter",
        goes_wrong="end points {3} and {2} are met by MIN: 2, which is none of rank 0",
        script=play(_sidecar("trailing_pages", 10, frozenset({3}), frozenset({2}))),
        naive=Way("the MIN of the last end points", calls=MinOfEnds),
        wrong=all_see(settled={"A": 2}),
        right=all_see(granted={}, settled={"A": 0}, held=0),
    ),
    Scenario(
        name="second attempt",
        source="field: second attempt",
        goes_wrong="a requeued request meets its old ack: 300 pages that nobody has read for it",
        script=play(SECOND_ATTEMPT),
        naive=Way("acks by request", calls=ByRequest),
        wrong=all_see(settled={"A": 0, "A/1": 300}, read={"A": 300, "A/1": 100}),
        right=all_see(settled={"A": 0, "A/1": 100}, read={"A": 300, "A/1": 100}, held=0),
    ),
    Scenario(
        name="cancel before ticket",
        source="field: cancel before ticket",
        goes_wrong="an abort that comes before the ticket is forgotten: pages are held for ever",
        script=play(CANCEL),
        naive=Way("aborts of the unknown are nothing", member=ForgetfulMember),
        wrong=all_see(granted={"A": 300}, held=300, free=4096 - 300),
        right=all_see(granted={}, held=0, free=4096, memory=4096),
    ),
    Scenario(
        name="cancel right behind the ticket",
        source="field: cancel before ticket",
        goes_wrong="an aborted request keeps its share of the occupancy: reads from L3 stop, and "
        "writes go on",
        script=play(CANCEL_AT_ONCE),
        naive=BROKEN["leaks on abort"].policy,
        wrong=all_see(settled={"A": 0}, granted={}, held=896),
        right=all_see(settled={"A": 0, "B": 896}, granted={"B": 896}, held=0),
    ),
)  # fmt: skip
"""All of them."""
