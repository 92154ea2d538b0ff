"""Values that each rank has its own of: hits, progress, clocks, capacity, timings.

The rule is the same for all: MIN before any use, and one clock, the leader's.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING

from l3store.consensus.models import ChunkModel
from l3store.testing.consensus.field_rank import Seen, Way
from l3store.testing.consensus.field_script import Answer, Input, Script, each, submit
from l3store.testing.consensus.field_sees import (
    all_of,
    all_see,
    cannot_go_on,
    dies,
    ranks_see,
)
from l3store.testing.consensus.field_stage import Told, play
from l3store.testing.consensus.naive_calls import Unguarded
from l3store.testing.consensus.naive_votes import Alone, Voting
from l3store.testing.consensus.scenario import Scenario
from l3store.testing.simulation.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.consensus.agreement import Agreement
    from l3store.testing.simulation.world import Outcome, Policy

__all__ = ["VALUES", "in_company"]

JOIN_S = 10.0


class _Room:
    """A link that can share and nothing else: ranks are threads that meet at a barrier."""

    dropped = 0

    def __init__(self, rank: int, barrier: Barrier, blobs: list[bytes]) -> None:
        self.rank, self.ranks = rank, barrier.parties
        self._barrier, self._blobs = barrier, blobs

    def share(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Gives each rank's blob to all."""
        self._blobs[self.rank] = blob
        self._barrier.wait(timeout_s)
        all_blobs = list(self._blobs)
        self._barrier.wait(timeout_s)
        return all_blobs

    def close(self) -> None:
        """Lets nobody wait for this rank."""
        self._barrier.abort()


def in_company(
    policy: Policy, capacities: tuple[int, ...], then: Callable[[Agreement], object]
) -> Told:
    """Has ranks join a group, as threads, and returns what each makes of it.

    Args:
        policy: Whose agreement they join by.
        capacities: Host pages of each rank.
        then: What a rank does when it has joined; its result is `Seen.value`.
    """
    config = Script(len(capacities)).config()
    barrier, blobs = Barrier(len(capacities)), [b""] * len(capacities)

    class Joining(policy.agreement):  # type: ignore[misc, name-defined]
        _carries = ()

        def _start(self) -> None:
            """Only joining is looked at: no facts are exchanged."""

    def rank(number: int) -> object:
        room = _Room(number, barrier, blobs)
        return then(Joining.join(room, config, capacities[number], JOIN_S))

    with ThreadPoolExecutor(len(capacities)) as pool:
        values = list(pool.map(rank, range(len(capacities))))
    told = Told(Plan(1, config, ()))
    told.seen = [Seen(number, value=value) for number, value in enumerate(values)]
    return told


# -- capacity, chunk model

BUDGET = 100_000_000_000
TOKEN_BYTES = (12_464, 13_120)
PAGE = 64


def _capacity(policy: Policy) -> Outcome:
    """Two stages with the same bytes of host memory, and tokens of unequal size."""
    pages = tuple(BUDGET // size // PAGE for size in TOKEN_BYTES)
    return in_company(policy, pages, lambda joined: joined.capacity_pages * PAGE)


def _timings(rank: int) -> list[tuple[int, float]]:
    """What a rank measures: its attention costs a little more than that of the rank before."""
    curve = 2e-9 * (1 + 0.1 * rank)
    return [(tokens, curve * tokens**2 + 1e-5 * tokens + 0.004) for tokens in range(8192, 0, -512)]


def _chunks(policy: Policy) -> Outcome:
    """Each rank has its own timings of the same chunks, and cuts prompts by a curve of them."""

    def cut(joined: Agreement) -> object:
        own = json.dumps(_timings(joined.rank)).encode()
        samples = json.loads(joined.share(own, JOIN_S)[0])
        model = ChunkModel(samples, base=8192, page=64, context=131_072)
        return tuple(model.length(history) for history in range(0, 120_000, 8192))

    return in_company(policy, (1, 1), cut)


def _same_chunks(outcome: Outcome) -> bool:
    """Every rank cuts alike, by a curve that was fitted: chunks get shorter."""
    cuts = {each.value for each in outcome.seen} if isinstance(outcome, Told) else set()
    return len(cuts) == 1 and all(isinstance(cut, tuple) and len(set(cut)) > 1 for cut in cuts)


# -- scripts

ALONE = Way("alone", Alone)
NAIVE_VOTES = Way("votes of unguarded calls", Voting, calls=Unguarded)


def _hits(*hits: int, **options: object) -> Script:
    return Script(
        len(hits), (submit(8, "A", 1024),), {("A", 0): each(*hits)}, options=options, steps=30
    )


HIT = _hits(896, 0)
PROGRESS = Script(
    inputs=(submit(8, "A", 896),),
    answers={("A", 0): (Answer(896), Answer(896, reads=((0.01, 300),)))},
)
WANTED = Script(
    inputs=(submit(8, "A", 896), Input(20, "want", "A")),
    answers={("A", 0): (Answer(896), Answer(896, reads=((0.01, 300), (0.4, 896))))},
    options={"policy": "best_effort"},
)
OUTAGE = Script(
    inputs=(submit(8, "A", 896),), answers={("A", 0): (Answer(896), Answer(896, fails=True))}
)


def _timeout(*rates: float) -> Script:
    """The clocks of two ranks run unequally fast between two steps."""
    slow = Answer(896, reads=((3.0, 896),))
    return Script(
        inputs=(submit(8, "A", 896),),
        answers={("A", 0): (slow, slow)},
        steps=16,
        step_s=1.01,
        rates=rates,
        options={"policy": "timeout", "timeout_s": 1.0},
    )


VALUES = (
    Scenario(
        name="hit length differs",
        source="field: hit length differs",
        goes_wrong="ranks read hits of 896 and 0, and schedule on them",
        script=play(HIT),
        naive=ALONE,
        wrong=ranks_see(granted=({"A": 896}, {}), settled=({"A": 896}, {"A": 0})),
        right=all_see(granted={}, settled={"A": 0}),
    ),
    Scenario(
        name="hit length differs on three ranks",
        source="field: hit length differs",
        goes_wrong="ranks read hits of 896, 0 and 512, and schedule on them",
        script=play(_hits(896, 0, 512)),
        naive=ALONE,
        wrong=ranks_see(settled=({"A": 896}, {"A": 0}, {"A": 512})),
        right=all_see(granted={}, settled={"A": 0}),
    ),
    Scenario(
        name="hit length differs from what was asked",
        source="field: hit length differs",
        goes_wrong="nothing, even without an agreement, where all ranks have 896",
        script=play(_hits(896, 896)),
        naive=ALONE,
        wrong=all_see(settled={"A": 896}),
        right=all_see(granted={"A": 896}, settled={"A": 896}, free=4096 - 896, held=0),
    ),
    Scenario(
        name="progress differs",
        source="field: progress differs",
        goes_wrong="partial reads of 896 and 300 pages are both taken for the prefix",
        script=play(PROGRESS),
        naive=ALONE,
        wrong=ranks_see(settled=({"A": 896}, {"A": 300})),
        right=all_see(settled={"A": 300}, free=4096 - 300, held=0),
    ),
    Scenario(
        name="progress differs when the scheduler wants it",
        source="field: progress differs",
        goes_wrong="each rank runs the request on the pages that it has by then: 896 and 300",
        script=play(WANTED),
        naive=ALONE,
        wrong=ranks_see(settled=({"A": 896}, {"A": 300})),
        right=all_see(settled={"A": 300}, reasons={"A": "wanted"}, free=4096 - 300, held=0),
    ),
    Scenario(
        name="revoke alone",
        source="field: revoke alone",
        goes_wrong="one rank is below the threshold of 256 and revokes, the other downloads",
        script=play(_hits(300, 200, threshold_pages=256)),
        naive=ALONE,
        wrong=ranks_see(granted=({"A": 300}, {}), settled=({"A": 300}, {"A": 0})),
        right=all_see(
            granted={}, settled={"A": 0}, reasons={"A": "short"}, held=0, free=4096, memory=4096
        ),
    ),
    Scenario(
        name="timeout verdict",
        source="field: timeout verdict",
        goes_wrong="1.01 s and 0.99 s have passed of 1.0 s: one rank gives up, the other does not",
        script=play(_timeout(1.0, 0.99 / 1.01)),
        naive=ALONE,
        wrong=ranks_see(settled_in=({"A": 9}, {"A": 10})),
        right=all_see(settled_in={"A": 9}, reasons={"A": "timeout"}, held=0),
    ),
    Scenario(
        name="timeout verdict of a slow leader",
        source="field: timeout verdict",
        goes_wrong="0.99 s and 1.01 s have passed: the leader would wait, the other gives up",
        script=play(_timeout(0.99 / 1.01, 1.0)),
        naive=ALONE,
        wrong=ranks_see(settled_in=({"A": 10}, {"A": 9})),
        right=all_see(settled_in={"A": 10}, reasons={"A": "timeout"}, held=0),
    ),
    Scenario(
        name="outage on one rank",
        source="field: outage on one rank",
        goes_wrong="a storage call raises before its vote: the thread ends, the peer waits for it",
        script=play(OUTAGE),
        naive=NAIVE_VOTES,
        wrong=all_of(cannot_go_on(0), dies(1, "ConnectionError"), ranks_see(settled=({}, {}))),
        right=all_see(granted={}, settled={"A": 0}, error=""),
    ),
    Scenario(
        name="capacity differs",
        source="field: capacity differs",
        goes_wrong="equal bytes of host memory are unequal numbers of tokens on two stages",
        script=_capacity,
        naive=ALONE,
        wrong=ranks_see(value=(8_023_104, 7_621_888)),
        right=all_see(value=7_621_888),
    ),
    Scenario(
        name="chunk model",
        source="field: chunk model",
        goes_wrong="each rank fits its own timings, and cuts the same prompt into other chunks",
        script=_chunks,
        naive=ALONE,
        wrong=lambda outcome: not _same_chunks(outcome),
        right=_same_chunks,
    ),
)
"""All of them."""
