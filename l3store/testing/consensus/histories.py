"""Sixteen histories that break simpler agreements, each as a scenario."""

from __future__ import annotations

from l3store.consensus.local import Network
from l3store.consensus.values import Config, Topology
from l3store.testing.consensus.scenario import Scenario, all_back, both, settled, violated
from l3store.testing.simulation.broken import BROKEN
from l3store.testing.simulation.plan import Fault, Plan, Request, chain

__all__ = ["HISTORIES"]

CALM = Network(quick=(0.001, 0.002))
"""Nothing is lost, late, doubled or overtaken."""


def _config(ranks: int = 2, **given: object) -> Config:
    usual = {
        "policy": "wait_complete", "max_pages": 64, "batch_pages": 1, "deadline_s": 0.2,
        "heartbeat_s": 0.05, "peer_timeout_s": 1e6, **given,
    }  # fmt: skip
    return Config(Topology(ranks, tp=ranks), **usual)  # type: ignore[arg-type]


HISTORIES = (
    Scenario(
        name="a rank releases pages alone",
        source="history 1",
        goes_wrong="free counts differ, then evictions, then trees",
        script=Plan(
            1,
            _config(),
            (Request("r", 3, chain(0, 8)),),
            # Rank 0 soon ends at 3 pages; when rank 1 has them too, its read of page 5 hangs.
            (Fault("read failed", 0, 3), Fault("read late", 1, 5, length=0.5)),
            CALM,
            read_s=(0.02, 0.02),
            pace=(1.0, 3.0),
        ),
        naive=BROKEN["alone"].policy,
        wrong=violated("host pages are free"),
        right=both(settled("r", 3, "complete"), all_back),
    ),
)
"""All of them, in their order."""
