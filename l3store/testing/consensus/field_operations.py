"""Acks, drains and sends: what runs beside the scheduler, and what the leader says of it.

The rules: consume what is agreed, with a bounded wait, never `pop(0)`; a backup never votes and
always acks; whoever sends awaits the send of the round before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from l3store.consensus.reports import Reports
from l3store.consensus.values import Kind
from l3store.testing.consensus.field_rank import Seen, Way
from l3store.testing.consensus.field_script import NEVER, RAISES, Input, Script
from l3store.testing.consensus.field_sees import all_of, all_see, dies, every, ranks_see
from l3store.testing.consensus.field_stage import Stage, play
from l3store.testing.consensus.naive_calls import DeadWriter
from l3store.testing.consensus.naive_votes import LeaderCounts, UncheckedCounts
from l3store.testing.consensus.scenario import Scenario

if TYPE_CHECKING:
    from l3store.consensus.local import LocalGroup
    from l3store.testing.simulation.world import Outcome, Policy

__all__ = ["OPERATIONS"]

COUNTS = Way("the leader's counts and pop(0)", UncheckedCounts)
CHECKED = Way("the leader's counts, checked", LeaderCounts)
THIRD_S = 0.5


def _drain(third: float) -> Script:
    """The leader has 3 acks; the other rank has 2, and a third one later."""
    return Script(
        inputs=(Input(8, "issue"),) * 3,
        durations={Kind.WRITE_THROUGH: ((0.01, 0.01, 0.01), (0.01, 0.01, third))},
        steps=80,
    )


POP = _drain(THIRD_S)
STAYS_EMPTY = _drain(NEVER)
BACKUPS = Script(
    inputs=(
        *(Input(8, "issue", kind=Kind.BACKUP),) * 2, Input(20, "issue", kind=Kind.BACKUP),
    ),
    durations={Kind.BACKUP: ((0.01, 0.01, 0.01), (RAISES, 0.01, 0.01))},
)  # fmt: skip

ROUNDS = 4000


class _Handle(bytearray):
    """What a send returns: it holds the frame until it has arrived, or as long as it is kept."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class _Unawaited(Reports):
    """A leader that keeps the handle of each send, and awaits none."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._handles: list[object] = []
        isend = self._link.publish

        def publish(frame: bytes) -> None:
            self._handles.append(isend(frame))

        self._link.publish = publish  # type: ignore[method-assign]


def _leak(policy: Policy) -> Outcome:
    """An idle group takes 4000 steps; how many of the leader's sends are outstanding then?"""
    sent: WeakSet[_Handle] = WeakSet()

    def wire(group: LocalGroup) -> None:
        def isend(frame: bytes) -> _Handle:
            handle = _Handle(frame)
            sent.add(handle)
            group.publish(handle)  # type: ignore[arg-type]
            return handle

        group.links[0].publish = isend  # type: ignore[method-assign, assignment]

    told = Stage(Script(steps=ROUNDS, step_s=0.002), policy, wire).run()
    for seen in told.seen:
        seen.value = len(sent)
    return told


def _outstanding(seen: Seen) -> int:
    return seen.value if isinstance(seen.value, int) else -1


OPERATIONS = (
    Scenario(
        name="pop from empty list",
        source="field: pop from empty list",
        goes_wrong="the leader says 3 and the rank's queue holds 2: pop from empty list",
        script=play(POP),
        naive=COUNTS,
        wrong=dies(1, "IndexError: pop from empty list"),
        right=all_of(
            all_see(consumed={"write_through": [0, 1, 2]}, pins=0),
            every(lambda seen: seen.consumed_s["write_through"] >= THIRD_S),
        ),
    ),
    Scenario(
        name="pop from empty list that stays empty",
        source="field: pop from empty list",
        goes_wrong="the third ack never comes: pop from empty list",
        script=play(STAYS_EMPTY),
        naive=COUNTS,
        wrong=dies(1, "IndexError: pop from empty list"),
        right=all_see(consumed={"write_through": [0, 1]}, pins=1),
    ),
    Scenario(
        name="backup dies",
        source="field: backup dies",
        goes_wrong="an exception ends the writer thread: backups stop, their pages stay pinned",
        script=play(BACKUPS),
        naive=Way("a writer without a guard", calls=DeadWriter),
        wrong=all_of(ranks_see(writer_alive=(True, False)), all_see(consumed={}, pins=3)),
        right=all_see(
            writer_alive=True, consumed={"backup": [0, 1, 2]}, failed={"backup": [0]}, pins=0
        ),
    ),
    Scenario(
        name="handle leak",
        source="field: handle leak",
        goes_wrong="sends are never awaited: the leader holds a handle and a clone of each round",
        script=_leak,
        naive=Way("sends that nobody awaits", _Unawaited),
        wrong=every(lambda seen: _outstanding(seen) >= ROUNDS),
        right=every(lambda seen: _outstanding(seen) <= 1),
    ),
)
"""All of them."""
