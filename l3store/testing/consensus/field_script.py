"""What happens to each rank in a scenario of the field, literally: inputs, answers, durations.

A script is the same for every policy. In virtual time it is played by `field_stage`, over real
links by whoever gives `ScriptedRank` a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from l3store.consensus.values import Config, Kind, Span, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NEVER", "RAISES", "Answer", "Input", "Label", "Script", "each", "submit"]

Label: TypeAlias = tuple[str, int]
"""(rid, attempt) of a ticket."""

NEVER = float("inf")
"""The duration of a call that does not return."""
RAISES = -1.0
"""The duration of an operation that raises."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank's storage does for one attempt of a request.

    Attributes:
        hit: Pages of kv that are stored for this rank.
        after: Seconds from the submit to the answer of the query; `NEVER`: it hangs.
        fails: The query raises.
        pools: Pages that are stored of each sidecar; of a trailing_pages pool: its end points.
        reads: (seconds from the grant, pages from the start that are read by then); none: all.
        hangs_s: Seconds from the grant after which one more read returns that brings nothing.
        fits: Whether this rank's memory has room for the pages.
    """

    hit: int = 0
    after: float = 0.005
    fails: bool = False
    pools: Mapping[str, int | frozenset[int]] = field(default_factory=dict)
    reads: tuple[tuple[float, int], ...] = ()
    hangs_s: float = 0.0
    fits: bool = True


class Input(NamedTuple):
    """A step input. Every rank gets it in the same step, counted from when L3 is on.

    With a `rank` it is the order in which requests reach that rank; an engine gives all ranks the
    leader's.
    """

    step: int
    what: str
    """submit, abort, want, or issue."""
    rid: str = ""
    attempt: int = 0
    pages: int = 0
    sidecars: tuple[tuple[str, str], ...] = ()
    kind: Kind = Kind.WRITE_THROUGH
    rank: int | None = None

    def span(self) -> Span:
        """Returns what a submit asks for."""
        tail = f"{self.rid} {self.pages}".encode()
        return Span(self.rid, self.attempt, 0, self.pages, tail, self.sidecars)


def submit(step: int, rid: str, pages: int, attempt: int = 0, **more: object) -> Input:
    """Returns the input that opens a ticket."""
    return Input(step, "submit", rid, attempt, pages, **more)  # type: ignore[arg-type]


def each(*hits: int) -> tuple[Answer, ...]:
    """Returns the answers of ranks that have so many pages, and read them all."""
    return tuple(Answer(hit) for hit in hits)


@dataclass(frozen=True, slots=True)
class Script:
    """One small case.

    Attributes:
        ranks: In the group.
        inputs: In the order in which they are given within a step.
        answers: Of each attempt, by rank; in a larger group they are repeated.
        durations: Seconds from the issue of each operation of a kind to its end, by rank, likewise.
        steps: The run ends when every rank has taken so many since L3 is on.
        step_s: Seconds between two of them.
        capacity: Host pages, by rank; one number: of all.
        rates: By rank: seconds of its clock in one second; a rank without: 1.
        own_order: Each rank submits in the order in which requests reach it, whatever the policy.
        options: Fields of `Config` that are not the usual ones.
    """

    ranks: int = 2
    inputs: tuple[Input, ...] = ()
    answers: Mapping[Label, tuple[Answer, ...]] = field(default_factory=dict)
    durations: Mapping[Kind, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    steps: int = 60
    step_s: float = 0.01
    capacity: tuple[int, ...] = (4096,)
    rates: tuple[float, ...] = ()
    own_order: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    def config(self, **more: object) -> Config:
        """Returns what all ranks have in common."""
        usual: dict[str, object] = {
            "policy": "wait_complete", "batch_pages": 128, "deadline_s": 0.2, "heartbeat_s": 0.05,
            "peer_timeout_s": 1e6, **self.options, **more,
        }  # fmt: skip
        return Config(Topology(self.ranks, tp=self.ranks), **usual)  # type: ignore[arg-type]

    def capacity_of(self, rank: int) -> int:
        """Returns the host pages of a rank."""
        return self.capacity[rank % len(self.capacity)]
