"""Sixteen histories that break simpler agreements, each as a scenario."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from l3store.consensus.local import Network
from l3store.consensus.values import Config, Topology
from l3store.testing.consensus.scenario import (
    Scenario,
    all_back,
    both,
    holds,
    settled,
    violated,
)
from l3store.testing.simulation.broken import BROKEN
from l3store.testing.simulation.plan import Fault, Plan, Request, chain

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.testing.simulation.world import Outcome

__all__ = ["HISTORIES"]

CALM = Network(quick=(0.001, 0.002))
"""Nothing is lost, late, doubled or overtaken."""
REQUEST = Request("r", 3, chain(0, 8))
SOME = tuple(Request(f"r{n}", 3 + n, chain(n, 4)) for n in range(3))
MANY = tuple(Request(f"r{n}", 3 + 3 * n, chain(n, 3)) for n in range(40))
NOTHING_STORED = (frozenset[int](), frozenset[int]())


def _plan(
    *faults: Fault,
    requests: tuple[Request, ...] = (REQUEST,),
    seed: int = 1,
    config: dict[str, Any] | None = None,
    **given: Any,
) -> Plan:
    """Returns a plan of two ranks that waits for all pages, one a call, over a calm network."""
    usual = {
        "policy": "wait_complete", "max_pages": 64, "batch_pages": 1, "deadline_s": 0.2,
        "heartbeat_s": 0.05, "peer_timeout_s": 1e6, **(config or {}),
    }  # fmt: skip
    even = {"network": CALM, "query_s": (0.01, 0.01), "read_s": (0.02, 0.02), **given}
    return Plan(seed, Config(Topology(2, tp=2), **usual), requests, faults, **even)


def _switched(times: int) -> Callable[[Outcome], bool]:
    return lambda outcome: outcome.switches == times


def _more_than(times: int) -> Callable[[Outcome], bool]:
    return lambda outcome: outcome.switches > times


def _stored(pages: int) -> Callable[[Outcome], bool]:
    return lambda outcome: all(rank.stored == pages for rank in outcome.ranks)


def _stored_differs(outcome: Outcome) -> bool:
    return len({rank.stored for rank in outcome.ranks}) > 1


def _told(*words: str) -> Callable[[Outcome], bool]:
    """A condition: the group stopped by name, before anything was wrong."""
    return lambda outcome: not outcome.violations and all(w in outcome.refused for w in words)


HISTORIES = (
    Scenario(
        name="a rank releases pages alone",
        source="history 1",
        goes_wrong="free counts differ, then evictions, then trees",
        # Rank 0 soon ends at 3 pages; when rank 1 has them too, its read of page 5 hangs.
        script=_plan(
            Fault("read failed", 0, 3), Fault("read late", 1, 5, length=0.5), pace=(1.0, 3.0)
        ),
        naive=BROKEN["alone"].policy,
        wrong=violated("host pages are free"),
        right=both(settled("r", 3, "complete"), all_back),
    ),
    Scenario(
        name="quiet is said before the grant was applied",
        source="history 2",
        goes_wrong="a page is free under a live read",
        # Rank 1 stands still when the grant comes. The abort comes before it goes on, so the
        # leader hears quiet from a rank that begins to read later.
        script=_plan(Fault("lag", 1, 8, length=0.15), Fault("aborted", at=12), pace=(1.0, 6.0)),
        naive=BROKEN["quiet early"].policy,
        wrong=violated("is free under a call"),
        right=both(settled("r", 0, "aborted"), all_back),
    ),
    Scenario(
        name="one bound for what is not known",
        source="history 3",
        goes_wrong="the first record after the submit revokes every ticket",
        script=_plan(requests=SOME),
        naive=BROKEN["one bound"].policy,
        wrong=violated("was revoked, and no rank has said less"),
        right=both(*(settled(each.name, 4, "complete") for each in SOME), all_back),
    ),
    Scenario(
        name="the last report is lost",
        source="history 4",
        goes_wrong="nothing goes on",
        script=_plan(requests=SOME, seed=10, network=replace(CALM, lost=0.6)),
        naive=BROKEN["says once"].policy,
        wrong=violated("hangs"),
        right=both(*(settled(each.name, 4, "complete") for each in SOME), all_back),
    ),
    Scenario(
        name="a rank declines a ticket",
        source="history 5",
        goes_wrong="the ticket is never admitted, never released",
        script=_plan(Fault("declined", 1, 0)),
        naive=BROKEN["no row"].policy,
        wrong=violated("hangs"),
        right=both(settled("r", 0, "short"), all_back),
    ),
    Scenario(
        name="a late read is made again into the same pages",
        source="history 6",
        goes_wrong="a page joins the tree, and the first call is still to write into it",
        script=_plan(Fault("read late", 1, 2, length=0.3)),
        naive=BROKEN["retries"].policy,
        wrong=violated("was settled under a call"),
        right=both(settled("r", 2, "complete"), all_back),
    ),
    Scenario(
        name="a report is overtaken",
        source="history 7",
        goes_wrong="what an older report says is believed, and facts go back",
        script=_plan(requests=SOME, network=Network(delayed=0.3, doubled=0.2)),
        naive=BROKEN["arrival"].policy,
        wrong=violated("took back"),
        right=both(*(settled(each.name, 4, "complete") for each in SOME), all_back),
    ),
    Scenario(
        name="backups are counted, not named",
        source="history 8",
        goes_wrong="a backup is consumed unfinished",
        # Rank 0 soon has ended 0, 1 and 2; rank 1 has ended 0 and 2.
        script=_plan(Fault("backup late", 1, 1, length=0.3), requests=SOME, stored=NOTHING_STORED),
        naive=BROKEN["counts backups"].policy,
        wrong=violated("backup 1 was consumed, and has not ended"),
        right=both(holds, all_back, _stored(12)),
    ),
    Scenario(
        name="a backup fails on one rank",
        source="history 9",
        goes_wrong="ranks differ in what is stored, and so do their trees",
        script=_plan(Fault("backup failed", 1, 0), stored=NOTHING_STORED),
        naive=BROKEN["stored here"].policy,
        wrong=both(violated("tree's state"), _stored_differs),
        right=both(holds, all_back, _stored(0)),
    ),
    Scenario(
        name="a backup acks at its deadline",
        source="history 10",
        goes_wrong="the hung write reads a page that is reused: a poisoned object in the store",
        script=_plan(
            Fault("backup late", 1, 0, length=1.0),
            requests=tuple(Request(f"r{n}", 3 + 15 * n, chain(n, 4)) for n in range(6)),
            stored=NOTHING_STORED,
            capacity=8,
        ),
        naive=BROKEN["acks at deadline"].policy,
        wrong=violated("under the key of"),
        right=both(holds, all_back),
    ),
    Scenario(
        name="a backup hangs in front of others",
        source="history 11",
        goes_wrong="every later backup stays pinned",
        script=_plan(Fault("backup never", 1, 0), requests=SOME, stored=NOTHING_STORED),
        naive=BROKEN["floor alone"].policy,
        wrong=violated("pages are kept"),
        right=both(holds, all_back, _stored(8)),
    ),
    Scenario(
        name="pages stay under late calls",
        source="history 11",
        goes_wrong="L3 stays on while host pages are lost to calls that hang",
        script=_plan(
            *(Fault("backup never", 1, number) for number in (0, 1)),
            requests=MANY,
            stored=NOTHING_STORED,
            config={"max_late_pages": 4},
        ),
        naive=BROKEN["late unsaid"].policy,
        wrong=both(holds, _switched(1)),
        right=both(holds, _switched(2)),
    ),
    Scenario(
        name="the leader alone probes",
        source="history 12",
        goes_wrong="epochs go on and off all through one outage",
        script=_plan(Fault("outage", 1, at=0.2, length=1.0), requests=MANY),
        naive=BROKEN["probes alone"].policy,
        wrong=_more_than(8),
        right=both(holds, all_back, _switched(3)),
    ),
    Scenario(
        name="usable is a flag",
        source="history 13",
        goes_wrong="a stale word ends the next epoch: an epoch too many",
        # Both paths fail at once. The leader's is well again before it hears of the other one.
        script=_plan(
            Fault("outage", 0, at=0.1, length=0.1),
            Fault("outage", 1, at=0.1, length=0.8),
            requests=MANY,
            seed=12,
            network=replace(CALM, lost=0.85),
            config={"interval_s": 0.05, "window": 64},
        ),
        naive=BROKEN["usable flag"].policy,
        wrong=both(violated("was not ready"), _more_than(3)),
        right=both(holds, all_back, _switched(3)),
    ),
    Scenario(
        name="a rank aborts between its report and the record",
        source="history 14",
        goes_wrong="a record names what one rank has freed",
        script=_plan(Fault("aborted", at=5)),
        naive=BROKEN["aborts alone"].policy,
        wrong=violated("record 5 says of ticket 0"),
        right=both(settled("r", 0, "aborted"), all_back),
    ),
    Scenario(
        name="inputs of ranks differ",
        source="history 15",
        goes_wrong="a MIN of different things, silently",
        script=_plan(Fault("unequal input", 1, 0), query_s=(0.001, 0.002)),
        naive=BROKEN["spans unseen"].policy,
        wrong=violated("ranks mean other pages by it"),
        right=_told("ticket 0", "rank 1"),
    ),
    Scenario(
        name="progress behind a hole counts",
        source="history 16",
        goes_wrong="a hole is settled",
        script=_plan(Fault("read late", 1, 1, length=0.3)),
        naive=BROKEN["counts batches"].policy,
        wrong=violated("and host page"),
        right=both(settled("r", 1, "complete"), all_back),
    ),
)
"""All of them, in their order."""
