"""How a batch becomes tasks: runs of neighbouring slots, shared out among a few threads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from l3store.backends.nvme.index import SLOT_BITS
from l3store.calls import together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from l3store.backends.nvme.segment import Segment
    from l3store.calls import Workers

__all__ = ["Stretch", "shared_out", "spread", "stretches"]

_LEAST_COST = 2 << 20  # bytes of a task: less does not pay a hand-over
_RUN_COST = 256 << 10  # what a run costs beside its bytes


class Stretch(NamedTuple):
    """Neighbouring slots of one segment, and which pages of the call they hold."""

    segment: Segment
    first: int
    pages: list[int]


def stretches(locations: Sequence[int | None], segments: Mapping[int, Segment]) -> list[Stretch]:
    """Returns where the pages of a call lie, sorted by slot, neighbours merged."""
    found: list[Stretch] = []
    order = sorted((at, i) for i, at in enumerate(locations) if at is not None)
    expected, pages = -1, list[int]()
    for at, i in order:
        if at != expected:
            pages = []
            found.append(Stretch(segments[at >> SLOT_BITS], at & (1 << SLOT_BITS) - 1, pages))
        pages.append(i)
        expected = at + 1
    return found


def shared_out(runs: Sequence[Stretch], workers: int, most: int) -> list[list[Stretch]]:
    """Cuts runs into tasks of about equal cost, one a worker, or more of at most `most` bytes."""
    bytes_ = sum([len(run.pages) * run.segment.geometry.slot_bytes for run in runs])
    cost = bytes_ + _RUN_COST * len(runs)
    target = max(_LEAST_COST, min(most, -(-cost // workers)))
    tasks: list[list[Stretch]] = []
    room = 0
    for run in runs:
        slot, done = run.segment.geometry.slot_bytes, 0
        room -= _RUN_COST
        while done < len(run.pages):
            if room <= 0:
                tasks.append([])
                room = target
            count = min(len(run.pages) - done, max(1, -(-room // slot)))
            tasks[-1].append(Stretch(run.segment, run.first + done, run.pages[done : done + count]))
            done, room = done + count, room - count * slot
    return tasks


def spread(
    tasks: Sequence[list[Stretch]], call: Callable[[list[Stretch]], None], workers: Workers
) -> list[BaseException]:
    """Runs a call for each task, the first one in this thread, and waits for all of them.

    Returns:
        What the calls raised.
    """
    _, failures = together(workers, [partial(call, task) for task in tasks])
    return failures
