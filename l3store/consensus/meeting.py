"""The leader's part: what the ranks say is met in records. Pure, and without an opinion.

Each value of a record is the MIN of what the ranks say, with two bounds for what is not known yet;
sets of end points are met by AND, failures by OR. docs/consensus.md says why.
"""

from __future__ import annotations

from functools import reduce
from itertools import compress
from operator import and_, itemgetter, lt
from typing import TYPE_CHECKING, Any

from l3store.consensus.protocol import Phase
from l3store.consensus.values import (
    ALL_ENDS,
    NO_ACKS,
    UNLIMITED,
    Acks,
    Bounds,
    Facts,
    Kind,
    Record,
    Row,
)
from l3store.errors import ConsensusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from l3store.consensus.protocol import Machine, Ops, Ticket
    from l3store.consensus.values import Config, TicketId

__all__ = ["Meeting", "join", "meet"]

_SPAN: Callable[[Any], int] = itemgetter(1)
_DONE: Callable[[Any], int] = itemgetter(3)
_ABSENT = Row(-1, 0, hit=0, final=True, quiet=True)


def meet(rows: Sequence[Row | None], ends: Iterable[int] = ()) -> Bounds:
    """Returns what the ranks have reached together for one ticket.

    Args:
        rows: One of each rank; None: nothing is known of it.
        ends: Sets of legal end points, of ranks whose hit is known.
    """
    known = [row for row in rows if row is not None] if None in rows else rows
    if not known:
        return Bounds()
    _, _, hits, done, groups, final, quiet = zip(*known, strict=True)
    hit_high = min(hits)
    done_high = min(compress(done, final), default=UNLIMITED)
    if len(known) < len(rows):
        return Bounds(hit_high=hit_high, done_high=done_high)
    if max(hits) == UNLIMITED:
        return Bounds(0, hit_high, min(done), done_high, min(groups), all(quiet))
    legal = reduce(and_, ends, ALL_ENDS) if ends else ALL_ENDS
    return Bounds(hit_high, hit_high, min(done), done_high, min(groups), all(quiet), legal)


def join(earlier: Record, later: Record) -> Record:
    """Returns one record for two that were decided after the same record: all news, the newest."""
    acks = tuple(
        new if new.ended else old for old, new in zip(earlier.acks, later.acks, strict=True)
    )
    rows = {**earlier.rows, **later.rows}
    return Record(later.number, later.now, later.epoch, later.storage_on, rows, acks)


class _Heard:
    """The newest facts of one rank, and its rows by ticket."""

    def __init__(self) -> None:
        self.facts: Facts | None = None
        self.numbers: tuple[int, ...] = ()
        self.rows: dict[TicketId, Row] = {}
        self.ends: dict[TicketId, int] = {}
        self.compared = 0  # digests up to this record were


class Meeting:
    """What the leader does with facts: keeps the newest of each rank, and meets them in records.

    It has no opinion: each value is the MIN of what the ranks say. One thread at a time uses it.
    """

    def __init__(self, config: Config, incarnation: int) -> None:
        self._topology = config.topology
        self._incarnation = incarnation
        self._heard = [_Heard() for _ in range(config.topology.ranks)]
        self._changed: set[TicketId] = set()
        self._moved: set[TicketId] = set()  # a rank has read more, and else nothing changed
        self._gaps: set[TicketId] = set()  # open, and a rank has no row
        self._open: set[TicketId] = set()  # at the last record
        self._size = 0, 0  # tickets that were submitted then, and open
        self._met: TicketId = 0
        self._acked: list[object] = [None] * len(Kind)
        self._news = False  # of operations, since the last record
        self._turned = True  # a veto or a readiness is new since then
        self._epochs = (0, False), (0, False)  # the last record's, and what the machine had before
        self._rows = [heard.rows for heard in self._heard]

    def hear(self, facts: Facts) -> bool:
        """Takes in what a rank says; a row that it does not repeat stays as it was.

        Returns:
            Whether it is newer than what was heard of that rank and of this group.

        Raises:
            ConsensusError: The rank took a fact back.
        """
        if facts.incarnation != self._incarnation or facts.rank >= len(self._heard):
            return False
        heard = self._heard[facts.rank]
        before, was = heard.facts, heard.numbers
        if before is None:
            now = _numbers(facts)
            self._news = self._turned = True
        else:
            if facts.seq <= before.seq:
                return False
            if facts.acked is before.acked:
                now = (facts.applied, facts.veto, facts.ready, *was[3:])
            else:
                now = _numbers(facts)
                self._news = self._news or facts.acked != before.acked
            if any(map(lt, now, was)):
                raise ConsensusError(
                    f"{self._topology.name(facts.rank)} took back what it said: applied, veto, "
                    f"ready and floors of operations were {was}, then {now}"
                )
            self._turned = self._turned or now[1:3] != was[1:3]
        heard.facts, heard.numbers = facts, now
        if before is not None and facts.rows is before.rows:
            return True
        rows, ends = heard.rows, facts.ends
        for row in facts.rows - before.rows if before else facts.rows:
            ticket = row[0]
            known = rows.get(ticket)
            if known is None:
                self._changed.add(ticket)
            elif (
                row[3] > known[3]
                and not known[5]
                and row[1:3] == known[1:3]
                and (row[4:] == known[4:])
            ):
                self._moved.add(ticket)
            elif not _grows(known, row):
                raise ConsensusError(
                    f"{self._topology.name(facts.rank)} took back what it said of ticket "
                    f"{ticket}: {known}, then {row}"
                )
            else:
                self._changed.add(ticket)
            rows[ticket] = row
            if ticket in ends:
                heard.ends[ticket] = ends[ticket]
        return True

    def applied(self) -> int:
        """Returns the last record that every rank is known to have applied."""
        return min([heard.facts.applied if heard.facts else 0 for heard in self._heard])

    def reached(self, rank: int) -> int:
        """Returns the last record that a rank is known to have applied."""
        facts = self._heard[rank].facts
        return facts.applied if facts else 0

    def decide(self, machine: Machine, now: float) -> Record:
        """Makes the next record from what was heard. `machine` is the leader's, not changed.

        Args:
            machine: It has applied all records so far. Its inputs may come at the same time, from
                the thread that steps.
            now: The leader's monotonic clock, in seconds.

        Raises:
            ConsensusError: A rank's spans or state differ from the leader's; it names the rank, and
                the ticket or the step.
        """
        self._compare(machine)
        tickets, following = machine.tickets, machine.next_ticket
        size = following, len(tickets)
        if size != self._size:
            still = set(tickets)
            for number in self._open - still:
                self._forget(number)
            self._open, self._size = still, size
        self._changed.update(range(self._met, following), self._gaps)
        for number in self._moved - self._changed:
            ticket = tickets.get(number)
            if ticket is None or self._least(number) != ticket.bounds.done_low:
                self._changed.add(number)
        self._moved.clear()
        self._met = following
        self._gaps.clear()
        rows = {}
        for number in sorted(self._changed):
            ticket = tickets.get(number)
            if ticket is not None:
                bounds = self._bounds(ticket)
                if bounds != ticket.bounds:
                    rows[number] = bounds
            elif number < following:
                self._forget(number)  # else a rank is ahead of the leader; its row is kept
        self._changed.clear()
        had = machine.epoch, machine.storage_on
        if self._turned or had != self._epochs[1]:
            self._epochs, self._turned = (self._epoch(machine), had), False
        epoch, storage_on = self._epochs[0]
        acks = NO_ACKS
        if self._news and all(heard.facts for heard in self._heard):
            acks = tuple(self._ended(kind, machine.ops[kind]) for kind in Kind)
            self._news = False
        return Record(machine.number + 1, now, epoch, storage_on, rows, acks)

    def _least(self, ticket: TicketId) -> int:
        """Returns what all ranks have read of a ticket of which each has a row."""
        return min(map(_DONE, map(itemgetter(ticket), self._rows)))

    def _forget(self, ticket: TicketId) -> None:
        for heard in self._heard:
            heard.rows.pop(ticket, None)
            heard.ends.pop(ticket, None)

    def _bounds(self, ticket: Ticket) -> Bounds:
        number, digest = ticket.id, ticket.span.digest
        rows = [known.get(number) for known in self._rows]
        if None in rows or set(map(_SPAN, rows)) != {digest}:
            self._look(ticket, rows)
        if not ticket.span.trailing:
            return meet(rows)
        if ticket.phase is not Phase.ASKING:  # the end point is chosen
            return meet(rows, [ticket.bounds.ends])
        return meet(rows, [heard.ends.get(ticket.id, 1) for heard in self._heard])

    def _look(self, ticket: Ticket, rows: list[Row | None]) -> None:
        """Puts in the answer of ranks without a row that will have none; compares spans."""
        for rank, row in enumerate(rows):
            if row is None:
                self._gaps.add(ticket.id)
                facts = self._heard[rank].facts
                if facts and facts.applied > ticket.step:
                    rows[rank] = _ABSENT
            elif row.span != ticket.span.digest:
                raise ConsensusError(self._unequal_spans(ticket, rank))

    def _unequal_spans(self, ticket: Ticket, rank: int) -> str:
        return (
            f"ticket {ticket.id}, submitted in step {ticket.step}: {self._topology.name(rank)} has "
            f"another span than the leader's {ticket.span}; the ranks' inputs or trees differ"
        )

    def _compare(self, machine: Machine) -> None:
        for rank, heard in enumerate(self._heard[1:], 1):  # the first is the machine's own
            facts = heard.facts
            if facts is None or facts.applied <= heard.compared:
                continue
            if facts.applied > machine.number:
                raise ConsensusError(
                    f"{self._topology.name(rank)} has applied record {facts.applied}; the last "
                    f"one that was made is {machine.number}"
                )
            first = max(heard.compared, facts.applied - len(facts.digests)) + 1
            count, back = facts.applied + 1 - first, machine.number - facts.applied
            if count and machine.digests(back + count)[back:] == facts.digests[:count]:
                heard.compared = facts.applied
                continue
            for number in range(first, facts.applied + 1):
                ours = machine.digest_after(number)
                if ours is not None and ours != facts.digests[facts.applied - number]:
                    raise ConsensusError(self._unequal_states(rank, heard.compared + 1, number))
                if ours is not None:
                    heard.compared = number

    def _unequal_states(self, rank: int, first: int, number: int) -> str:
        """A step is sure where the one before it was compared; sparse reports may skip some."""
        steps = f"step {number}" if first == number else f"one of the steps {first} to {number}"
        return (
            f"{self._topology.name(rank)} differs from the leader since {steps}: the inputs of the "
            f"step before were not the same, or the step's record had other effects"
        )

    def _epoch(self, machine: Machine) -> tuple[int, bool]:
        said = [heard.facts for heard in self._heard]
        vetoed = max((facts.veto for facts in said if facts), default=0)
        ready = min(facts.ready if facts else 0 for facts in said)
        if vetoed > machine.epoch or (vetoed == machine.epoch and machine.storage_on):
            return vetoed, False
        if not machine.storage_on and ready > machine.epoch:
            return machine.epoch + 1, True  # a rank may be ready for more: it was not asked yet
        return machine.epoch, machine.storage_on

    def _ended(self, kind: Kind, ops: Ops) -> Acks:
        said = [heard.facts for heard in self._heard if heard.facts]
        acked = [facts.acked[kind] for facts in said]
        if acked == self._acked[kind]:
            return Acks()
        self._acked[kind] = acked
        low, above = min(acked, key=itemgetter(0))
        ended = ops.ended.missing(low)
        ended += sorted(
            op
            for op in above
            if op >= low
            and op not in ops.ended
            and all(op < floor or op in others for floor, others in acked)
        )
        failed = frozenset[int]().union(*(facts.failed[kind] for facts in said))
        return Acks(tuple(ended), failed.intersection(ended))


def _numbers(facts: Facts) -> tuple[int, ...]:
    """What only grows, beside the rows."""
    return (facts.applied, facts.veto, facts.ready, *[floor for floor, _ in facts.acked])


def _grows(known: Row, row: Row) -> bool:
    _, old_span, old_hit, old_done, old_groups, old_final, old_quiet = known
    _, span, hit, done, groups, final, quiet = row
    return (
        span == old_span
        and (hit == old_hit or old_hit == UNLIMITED)
        and (done == old_done or (done > old_done and not old_final))
        and groups >= old_groups
        and final >= old_final
        and quiet >= old_quiet
    )
