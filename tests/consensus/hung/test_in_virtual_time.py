"""A storage call that hangs on one rank costs its own ticket a deadline, and nobody else anything.

Promised for `reports`: its ticket settles within the call's deadline + 2 steps + lag, where lag is
the way of a report (interval and network) and of a record (network). No other ticket is delayed.
The pages under the call come back on all ranks once it has returned, at the same record.
"""

from __future__ import annotations

import pytest

from l3store.consensus.local import Network
from l3store.consensus.values import Config, Grant, Release, Topology
from l3store.testing.simulation.engine import Engine
from l3store.testing.simulation.plan import Fault, Plan, Request, chain
from l3store.testing.simulation.world import Policy, World

DEADLINE, RETURNS = 0.2, 1.5
STEP = 0.01 * 1.2  # the simulation's pace and its jitter
NETWORK = Network(quick=(0.0001, 0.002))
LAG = 0.005 + 2 * 0.002
READ = 0.03


class Watched(Engine):
    """An engine that notes when each ticket was granted, settled and released here."""

    def __init__(self, *args):
        super().__init__(*args)
        self.granted, self.moments, self.released, self.reserved = {}, {}, {}, {}

    def _now(self):
        return self.storage._timeline.now

    def _carry_out(self, effects):
        for effect in effects:
            if isinstance(effect, Grant):
                self.granted[effect.ticket] = self._now()
            elif isinstance(effect, Release):
                self.released[effect.ticket] = (self.member.machine.number, self._now())
        super()._carry_out(effects)

    def _settle(self, effect):
        self.moments[effect.ticket] = (self._now(), effect.pages)
        super()._settle(effect)
        if effect.granted:
            self.reserved[effect.ticket] = len(self.host.tickets[effect.ticket].slots)


def played(kind, *, seed):
    """Four prompts at once on three ranks; the first read of rank 1 hangs."""
    config = Config(
        Topology(3, tp=3), policy="wait_complete", batch_pages=2, max_pages=64,
        deadline_s=DEADLINE, heartbeat_s=0.05, peer_timeout_s=1e6,
    )  # fmt: skip
    requests = tuple(Request(f"r{n}", 3, chain(n, 8)) for n in range(4))
    fault = Fault(kind, rank=1, number=0, length=RETURNS - DEADLINE)
    plan = Plan(seed, config, requests, (fault,), NETWORK, 64, query_s=(0.001, 0.01),
                read_s=(0.002, READ))  # fmt: skip
    world = World(plan, Policy("watched", engine=Watched))
    outcome = world.run()
    assert outcome.violations == []
    return world.engines


@pytest.fixture(scope="module", params=range(20))
def engines(request):
    return played("read late", seed=request.param)


def hung(engines):
    """The ticket whose first call on rank 1 hangs: the one that was granted first."""
    return min(engines[1].granted, key=engines[1].granted.get)


def test_its_own_ticket_settles_within_deadline_two_steps_and_lag(engines):
    ticket = hung(engines)
    began = engines[1].granted[ticket]
    for engine in engines:
        moment, pages = engine.moments[ticket]
        assert began + DEADLINE <= moment <= began + DEADLINE + 2 * STEP + LAG
        assert pages == 0


def test_no_other_ticket_is_delayed(engines):
    ticket = hung(engines)
    others = set(engines[0].moments) - {ticket}
    assert len(others) == 3
    for engine in engines:
        for other in others:
            moment, pages = engine.moments[other]
            assert pages == 8
            # Four calls, two in flight; the last rank's grant is at most a step after the first's.
            assert moment <= engine.granted[other] + 3 * STEP + LAG + 4 * READ


def test_its_pages_come_back_on_all_ranks_at_one_record_when_it_has_returned(engines):
    ticket = hung(engines)
    began = engines[1].granted[ticket]
    assert {engine.reserved[ticket] for engine in engines} == {8}
    (number,) = {engine.released[ticket][0] for engine in engines}
    assert number > max(engine.released[other][0] for engine in engines for other in
                        set(engine.released) - {ticket})  # fmt: skip
    for engine in engines:
        assert engine.released[ticket][1] >= began + RETURNS
        assert len(engine.host.free) + len(engine.host.nodes) == 64


def test_pages_under_a_call_that_never_returns_stay_out_on_all_ranks_alike():
    engines = played("read never", seed=5)
    ticket = hung(engines)
    for engine in engines:
        assert ticket not in engine.released
        assert engine.reserved[ticket] == 8
        assert len(engine.host.free) + len(engine.host.nodes) == 64 - 8
