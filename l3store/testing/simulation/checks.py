"""What must hold in a run: what all have decided is held against what every rank has.

At every step: equal states, no host page lost, no ticket open without L3, no record out of the
window, no epoch that a rank was not ready for, no grant or settlement beside what the ranks have.
At the end: a reason for every stop, tickets that ended alike on all ranks, no revoke where every
rank had the pages, at most two switches an outage, and no page pinned for ever. What a rank's calls
must keep is checked in its storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.consensus.protocol import Phase
from l3store.consensus.values import Grant, Kind, Settle
from l3store.consensus.values import Storage as Switch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.consensus.values import Effect, Span, TicketId
    from l3store.testing.simulation.engine import Engine
    from l3store.testing.simulation.plan import Plan
    from l3store.testing.simulation.world import Outcome

__all__ = ["Checks"]

UNUSABLE_S = 1.0
"""Virtual seconds after which a rank's broken path must have ended the epoch."""


_POLICY_OF = {"wanted": "best_effort", "timeout": "timeout"}
"""The policy under which alone a ticket may settle for a reason."""


class Checks:
    """Watches a run from outside.

    Args:
        plan: Of the run.
        engines: Of all ranks.
        clock: Virtual seconds.
        wrong: Called with a sentence for what must never happen.
    """

    def __init__(
        self,
        plan: Plan,
        engines: Sequence[Engine],
        clock: Callable[[], float],
        wrong: Callable[[str], None],
    ) -> None:
        self._plan, self._engines, self._clock, self._wrong = plan, engines, clock, wrong
        self._states: dict[int, tuple[int, int, int]] = {}
        self._off_since = [0.0] * len(engines)
        self._since: dict[TicketId, float] = {}

    @property
    def unequal(self) -> bool:
        """Whether a rank was given another input: then the group must stop by name."""
        return any(engine.storage.met["unequal input"] for engine in self._engines)

    def step(self, engine: Engine) -> None:
        """Looks at a rank that has taken a step."""
        machine, rank = engine.member.machine, engine.rank
        number = machine.number
        for effect in engine.effects:
            self._check_effect(rank, effect)
        lost = engine.host.lost()
        if lost:
            self._wrong(f"rank {rank}: host pages {lost} are lost or twice there in step {number}")
        held = sum(ticket.held for ticket in machine.tickets.values())
        if held != machine.occupancy:
            self._wrong(f"rank {rank}: occupancy {machine.occupancy}, and tickets hold {held}")
        if held > self._plan.config.occupancy_pages:
            self._wrong(f"rank {rank}: tickets hold {held} pages, above the limit")
        open_ones = [t for t in machine.tickets.values() if t.phase is not Phase.SETTLED]
        if open_ones and not machine.storage_on:
            names = [ticket.id for ticket in open_ones]
            self._wrong(f"rank {rank}: L3 is off, and tickets {names} are not settled")
        for ticket in open_ones:
            if rank == 0:
                self._since[ticket.id] = ticket.since
            if self._overdue(ticket.span, machine.now - ticket.since):
                self._wrong(f"rank {rank}: ticket {ticket.id} is overdue in step {number}")
        if machine.storage_on and engine.storage.unusable_s() > UNUSABLE_S:
            self._wrong(f"rank {rank}: L3 is on, and has long been unusable here")
        if self.unequal:
            return
        state = (machine.digests(1)[0], engine.host.digest(), len(engine.host.free))
        first = self._states.setdefault(number, state)
        if first[2] != state[2]:
            self._wrong(
                f"rank {rank}: {state[2]} host pages are free after step {number}, "
                f"elsewhere {first[2]}"
            )
        elif first != state:
            where = "machine's" if first[0] != state[0] else "tree's"
            self._wrong(f"rank {rank}: the {where} state after step {number} differs")
        ahead = number - min(each.member.machine.number for each in self._engines)
        if rank == 0 and ahead > self._plan.config.window:
            self._wrong(f"record {number} is {ahead} ahead of the slowest rank")

    def _check_effect(self, rank: int, effect: Effect) -> None:
        """Holds what all have decided against what every rank has: the leader is the first."""
        if isinstance(effect, Switch) and not effect.on:
            self._off_since[rank] = self._clock()
        if rank:
            return
        if isinstance(effect, Switch) and effect.on:
            for engine in self._engines:
                since = self._off_since[engine.rank]
                member = engine.member
                # A rank that lags may be on: if it has vetoed that epoch before it saw it begin.
                ahead = member.facts.facts().veto == effect.epoch - 1
                on = engine.rank and member.machine.storage_on and not ahead
                if on or not engine.storage.usable_between(since, self._clock()):
                    self._wrong(f"epoch {effect.epoch} began, and rank {engine.rank} was not ready")
        elif isinstance(effect, Grant):
            self._check_grant(effect)
        elif isinstance(effect, Settle):
            self._check_settlement(effect)

    def _check_grant(self, effect: Grant) -> None:
        spans = {engine.spans.get(effect.ticket) for engine in self._engines}
        if len(spans - {None}) > 1:
            self._wrong(f"ticket {effect.ticket} was granted, and ranks mean other pages by it")
            return
        end = self._agreed(effect.ticket)
        if end is None:
            self._wrong(f"ticket {effect.ticket} was granted before every rank had answered")
        elif end != effect.pages:
            self._wrong(f"ticket {effect.ticket} was granted {effect.pages} pages; all have {end}")
        elif end < self._plan.config.threshold_pages:
            self._wrong(f"ticket {effect.ticket} was granted {end} pages: not worth a download")

    def _check_settlement(self, effect: Settle) -> None:
        ticket, pages = effect.ticket, effect.pages
        ends = [engine.storage.runs.get(ticket, (0, False)) for engine in self._engines]
        least = min(run for run, _ in ends)
        if pages > least:
            self._wrong(f"ticket {ticket} settled at {pages} pages, and a rank has only {least}")
        trailing = self._engines[0].spans[ticket].trailing
        if trailing and pages not in (0, effect.granted):
            self._wrong(f"ticket {ticket} settled at {pages} pages, which is no end point")
        policy = _POLICY_OF.get(effect.reason, self._plan.config.policy)
        if policy != self._plan.config.policy:
            self._wrong(f"ticket {ticket} settled as {effect.reason} under another policy")
        elif effect.reason == "timeout":
            waited = self._engines[0].member.machine.now - self._since[ticket]
            if not self._overdue(self._engines[0].spans[ticket], waited):
                self._wrong(f"ticket {ticket} timed out too soon")
        elif effect.reason == "complete" and pages < effect.granted:
            ended = min((run for run, final in ends if final), default=effect.granted)
            if ended != pages and not (trailing and ended < effect.granted):
                self._wrong(f"ticket {ticket} is complete at {pages} pages; {ended} were to come")
        if effect.reason == "short":
            said = [
                engine.storage.hits[ticket][0]
                for engine in self._engines
                if ticket in engine.storage.hits
            ]
            end = self._agreed(ticket)
            most = min(said, default=effect.granted) if end is None else end
            if not said or most >= self._plan.config.threshold_pages:
                self._wrong(f"ticket {ticket} was revoked, and no rank has said less than enough")

    def _overdue(self, span: Span, waited: float) -> bool:
        """Whether a time-out is due, after so many seconds of the leader's clock in records."""
        config = self._plan.config
        limit = config.timeout_s + config.timeout_page_s * span.pages
        return config.policy == "timeout" and waited >= limit

    def _agreed(self, ticket: TicketId) -> int | None:
        """The pages that all ranks have by their own words; None: one has not answered."""
        said = [engine.storage.hits.get(ticket) for engine in self._engines]
        hits = [hit for hit in said if hit is not None]
        if len(hits) < len(said):
            return None
        least = min(pages for pages, _ in hits)
        if not self._engines[0].spans[ticket].trailing:
            return least
        legal = (2 << least) - 1
        for _, ends in hits:
            legal &= ends or 1
        return legal.bit_length() - 1

    def end(self, outcome: Outcome) -> None:
        """Looks at a run that has ended."""
        if self.unequal:
            if not outcome.refused:
                self._wrong("inputs differed, and no rank was told")
            return
        if outcome.refused:
            self._wrong(f"stopped without a reason: {outcome.refused}")
            return
        self._quality(outcome)
        first = self._engines[0]
        for engine in self._engines:
            if engine.idle and first.idle and engine.settled != first.settled:
                self._wrong(f"rank {engine.rank}: tickets ended otherwise than on rank 0")
            for page in engine.pinned_for_ever():
                self._wrong(f"rank {engine.rank}: page {page} is pinned, and nothing is going on")
            self._check_report(engine)

    def _check_report(self, engine: Engine) -> None:
        """What has ended for all must not be said for ever."""
        facts, machine = engine.member.facts.facts(), engine.member.machine
        rows = {row.ticket for row in facts.rows} - machine.tickets.keys()
        if rows:
            self._wrong(f"rank {engine.rank}: reports still tell of tickets {sorted(rows)}")
        for kind in Kind:
            ops = [op for op in facts.failed[kind] if op in machine.ops[kind].ended]
            if ops:
                self._wrong(f"rank {engine.rank}: reports still tell that {kind.name} {ops} failed")

    def _quality(self, outcome: Outcome) -> None:
        met = outcome.met
        queries = ("query", "outage", "declined")
        if not any(met[kind] for kind in met if kind.startswith(queries)):
            for name, pages, reason in outcome.settled:
                if reason == "short" and self._everyone_had(name, outcome):
                    self._wrong(f"{name} was revoked at {pages}, and every rank had its pages")
        causes = self._outages() + sum(
            met[kind] for kind in met if kind.endswith(("late", "never"))
        )
        if outcome.switches > 1 + 2 * causes:
            self._wrong(f"L3 was switched {outcome.switches} times in {causes} outages")

    def _everyone_had(self, name: str, outcome: Outcome) -> bool:
        request = next(each for each in self._plan.requests if each.name == name)
        if request.trailing or outcome.met["evicted"]:
            return False
        return all(set(request.pages) <= set(stored) for stored in self._plan.stored)

    def _outages(self) -> int:
        """Outages of each rank, those that touch counted once, and openings outside of them."""
        count = 0
        for engine in self._engines:
            spans = sorted(
                (fault.at, fault.at + fault.length + 0.5)
                for fault in self._plan.faults
                if fault.kind.startswith("outage") and fault.rank == engine.rank
            )
            end = -1.0
            for begin, finish in spans:
                count += begin > end
                end = max(end, finish)
            count += sum(
                not any(begin <= at <= finish for begin, finish in spans)
                for at in engine.storage.openings
            )
        return count
