"""What one run of the simulation is about: requests, stores, faults. Made from a seed, or by hand.

Everything in a plan can be left out one by one, which is how a failing run is made short.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from l3store.consensus.local import Network
from l3store.consensus.values import POLICIES, Config, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FAULTS", "Fault", "Page", "Plan", "Request", "plan_of", "smaller"]

Page: TypeAlias = int
"""Stands for a page hash: equal numbers are equal prefixes. `chain` makes them."""

FAULTS = {
    "lag": "a rank's scheduler stands still for a while",
    "query failed": "a query raises, and counts as 0",
    "query late": "a query outlasts its deadline, and counts as 0",
    "read failed": "a read raises",
    "read wrong": "a page fails its check",
    "read late": "a read outlasts its deadline, and writes into its pages until it returns",
    "read never": "a read never returns",
    "backup failed": "a backup raises",
    "backup late": "a backup outlasts its deadline, and reads its pages until it returns",
    "backup never": "a backup never returns",
    "evicted": "a page leaves the store between the query and the read",
    "declined": "a rank takes no part in a ticket",
    "declined after its hit": "a rank takes no further part in a ticket of which it has said a hit",
    "declined in reading": "a rank takes no further part in a ticket that was granted",
    "finished early": "a rank says before the grant that it will read nothing",
    "said later": "a rank says its progress a while after the call has left",
    "aborted": "a request is aborted",
    "outage": "a rank's path to the store fails for a while: every call raises",
    "outage hanging": "a rank's path to the store hangs for a while: no call returns in it",
    "unequal input": "one rank is given another input than the others",
}
"""Every kind of fault that a plan can have. The network's kinds are those of `LocalGroup.met`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: One of `FAULTS`.
        rank: Where.
        number: Of the step (lag, unequal input), the request (aborted), the ticket (declined,
            finished), or the rank's call of that kind, counted from 0.
        at: Virtual seconds: start of an outage; or the step of an abort.
        length: Virtual seconds; of what a rank does after its hit, its grant or its call: how long
            after.
    """

    kind: str
    rank: int = 0
    number: int = 0
    at: float = 0.0
    length: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that comes in at a step, on all ranks alike."""

    name: str
    step: int
    pages: tuple[Page, ...]
    busy: int = 2
    """Steps that it runs."""
    trailing: bool = False
    """Whether it has a pool of the rule trailing_pages."""
    patient: bool = False
    """Whether the scheduler has no place for it before its ticket is settled."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. Times are virtual seconds."""

    seed: int
    config: Config
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...] = ()
    network: Network = field(default_factory=Network)
    capacity: int = 40
    """Host pages."""
    stored: tuple[frozenset[Page], ...] = ()
    """By rank: what is in the store at the start; a rank without: all pages of all requests."""
    ends: tuple[frozenset[Page], ...] = ()
    """By rank: pages that are a legal end point of a trailing pool; a rank without: all."""
    step_s: float = 0.01
    """Between two steps of a rank, the leader's pace."""
    query_s: tuple[float, float] = (0.001, 0.03)
    read_s: tuple[float, float] = (0.002, 0.06)
    pace: tuple[float, ...] = ()
    """By rank: how many times slower its storage is; a rank without: 1."""
    early: bool = False
    """Progress is said before its call leaves, else after it; then it may be too late."""
    torn: bool = False
    """Reports go out in the middle of steps, too: a record is applied, and its inputs are not."""
    ahead: bool = False
    """The leader decides ahead when a report has come; if torn, in the middle of its steps, too."""


def chain(family: int, length: int, branch: int = 0, fork: int = 0) -> tuple[Page, ...]:
    """Returns the pages of a prompt; two of one family have the pages before both forks alike."""
    return tuple(
        family * 100_000 + (branch * 1000 if depth >= fork else 0) + depth
        for depth in range(length)
    )


def plan_of(seed: int) -> Plan:
    """Returns the plan of a seed: every kind of fault comes up, each in a small share of plans."""
    rng = Random(seed)
    pp, cp, tp = rng.choice([(1, 1, 2), (2, 1, 1), (1, 1, 3), (2, 1, 2), (1, 2, 2)])
    ranks = pp * cp * tp
    config = Config(
        Topology(ranks, pp=pp, cp=cp, tp=tp),
        policy=rng.choice(POLICIES),
        threshold_pages=rng.choice([1, 1, 2, 4]),
        occupancy_pages=rng.choice([24, 64, 1 << 20]),
        max_pages=64,
        max_late_pages=rng.choice([4, 8, 1000]),
        batch_pages=rng.choice([1, 2, 4]),
        deadline_s=0.2,
        timeout_s=rng.choice([0.02, 0.1, 0.4]),
        window=rng.choice([1, 2, 8]),
        interval_s=0.005,
        heartbeat_s=0.05,
        peer_timeout_s=1e6,
    )
    requests = tuple(_requests(rng, Random(-1 - seed)))
    leavings = _leavings(Random(f"left {seed}"), ranks, requests)
    return Plan(
        seed,
        config,
        requests,
        (*_faults(rng, ranks, requests), *leavings),
        Network(
            lost=rng.choice([0.0, 0.0, 0.1, 0.4]),
            delayed=rng.choice([0.0, 0.05, 0.2]),
            doubled=rng.choice([0.0, 0.1]),
        ),
        rng.choice([14, 24, 40]),
        *_contents(rng, ranks, requests),
        pace=tuple(rng.choice([1.0, 1.0, 3.0]) for _ in range(ranks)),
        query_s=rng.choice([(0.001, 0.004), (0.001, 0.03)]),
        early=Random(f"said early {seed}").random() < 0.3,
        torn=Random(f"torn {seed}").random() < 0.25,
        ahead=Random(f"decided ahead {seed}").random() < 0.5,
    )


def _requests(rng: Random, patience: Random) -> Iterator[Request]:
    step = 3
    for number in range(rng.randint(2, 7)):
        step += rng.choice([0, 0, 1, 3, 8])
        length = rng.randint(2, 10)
        pages = chain(rng.randrange(3), length, rng.randrange(3), rng.randint(1, 6))
        yield Request(
            f"r{number}", step, pages, rng.randint(1, 4), rng.random() < 0.2,
            patient=patience.random() < 0.2,
        )  # fmt: skip


def _faults(rng: Random, ranks: int, requests: tuple[Request, ...]) -> Iterator[Fault]:
    for _ in range(rng.choice([0, 1, 2, 3, 5])):
        kind = rng.choice(_COMMON)
        rank = rng.randrange(ranks)
        if kind == "lag":
            yield Fault(kind, rank, rng.randint(1, 40), length=rng.uniform(0.02, 0.3))
        elif kind == "aborted":
            number = rng.randrange(len(requests))
            yield Fault(kind, number=number, at=requests[number].step + rng.randint(-1, 5))
        elif kind.startswith("outage"):
            yield Fault(kind, rank, at=rng.uniform(0.02, 0.4), length=rng.uniform(0.1, 1.5))
        else:
            number, length = rng.randrange(5), rng.uniform(0.3, 2.0)
            everywhere = kind == "declined" and number % 2 == 0
            for each in range(ranks) if everywhere else [rank]:
                yield Fault(kind, each, number, length=length)
    if rng.random() < 0.05:
        yield Fault("unequal input", rng.randrange(ranks), rng.randrange(len(requests)))


def _leavings(rng: Random, ranks: int, requests: tuple[Request, ...]) -> Iterator[Fault]:
    """A rank, or each, is through with a ticket before the group is, or says of it what is late."""
    for kind in rng.choices([*_LEAVINGS], [*_LEAVINGS.values()], k=rng.choice([0, 0, 1, 2])):
        if kind == "said later":
            rank, call = rng.randrange(ranks), rng.randrange(8)
            for number in range(call, call + 3):
                yield Fault(kind, rank, number, length=rng.uniform(0.01, 0.2))
            continue
        number = rng.randrange(len(requests))
        everywhere = rng.random() < 0.5
        for rank in range(ranks) if everywhere else [rng.randrange(ranks)]:
            length = rng.choice([0.0, rng.uniform(0.0, 0.03), rng.uniform(0.0, 0.1)])
            yield Fault(kind, rank, number, length=length)


_LEAVINGS = {
    "declined after its hit": 3, "declined in reading": 3, "finished early": 2, "said later": 3,
}  # fmt: skip
"""What a rank does of its own accord to a ticket that goes on, by its weight."""
_COMMON = [kind for kind in FAULTS if kind not in ("unequal input", *_LEAVINGS)]


def _contents(
    rng: Random, ranks: int, requests: tuple[Request, ...]
) -> tuple[tuple[frozenset[Page], ...], tuple[frozenset[Page], ...]]:
    pages = sorted({page for request in requests for page in request.pages})
    if rng.random() < 0.3:
        return (), ()
    share = rng.choice([0.6, 0.9, 0.97])
    common = {page for page in pages if rng.random() < share}
    stored = tuple(frozenset(page for page in common if rng.random() < 0.95) for _ in range(ranks))
    ends = tuple(frozenset(page for page in pages if rng.random() < 0.6) for _ in range(ranks))
    return stored, ends


def smaller(plan: Plan) -> Iterator[Plan]:
    """Yields plans with one thing less: a fault, a request, its last page, a rough network."""
    for at in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:at] + plan.faults[at + 1 :])
    for at in range(len(plan.requests)):
        if len(plan.requests) > 1:
            yield _without(plan, at)
    for at, request in enumerate(plan.requests):
        if len(request.pages) > 2:
            shorter = replace(request, pages=request.pages[:-1])
            yield replace(plan, requests=(*plan.requests[:at], shorter, *plan.requests[at + 1 :]))
    if plan.network != Network():
        yield replace(plan, network=Network())
    if plan.early:
        yield replace(plan, early=False)
    if plan.torn:
        yield replace(plan, torn=False)
    if plan.ahead:
        yield replace(plan, ahead=False)


def _without(plan: Plan, at: int) -> Plan:
    """The plan without a request: faults of the others keep theirs."""
    faults = []
    for fault in plan.faults:
        if fault.kind in ("aborted", "unequal input"):
            if fault.number == at:
                continue
            fault = replace(fault, number=fault.number - (fault.number > at))
        faults.append(fault)
    return replace(
        plan, requests=plan.requests[:at] + plan.requests[at + 1 :], faults=tuple(faults)
    )
