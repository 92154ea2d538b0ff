"""`collective`: what is no vote on a ticket goes round as state, and the leader merges all of it.

Acks, epochs, applied records and rows that ended are told once each: an all-gather loses nothing,
so what was gathered need not be said again, and one fixed frame a round is enough.
"""

from __future__ import annotations

from dataclasses import replace
from struct import Struct
from threading import Lock
from typing import TYPE_CHECKING

from l3store.consensus.values import Facts, Kind, Row
from l3store.consensus.votes import Stream, Tag
from l3store.consensus.wire import decode_facts, encode_facts
from l3store.errors import ConsensusError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.consensus.values import Config, OpId, TicketId
    from l3store.consensus.votes import Listener, VoteTable

__all__ = ["Said", "State"]

ROWS, OPS = 32, 64
"""New rows of a round, and of each kind new operations that ended out of turn, and that failed."""
SLOWEST = 16
"""Intervals between two rounds at most, when nobody has anything to tell."""
_NEWS = Struct("<?L")
"""Whether there is anything new in it; length of the text."""


class State(Stream):
    """Rounds of what each rank has to tell beside its votes; one begins as soon as there is news.

    Rounds are `interval_s` apart. When nobody has news the next one comes later and later, up to
    `SLOWEST` intervals: how late is taken from the gathered frames, so ranks keep one pace. Unlike
    other streams this one votes also when it is idle.
    """

    purpose = "state"

    def __init__(
        self, table: VoteTable, config: Config, rank: int, listener: Listener | None = None
    ) -> None:
        self._none = Facts(0, 0, 0, 0, (0,) * config.window)
        ops = frozenset(range(OPS))
        most = replace(
            self._none, rows=frozenset([Row(ticket, 0) for ticket in range(ROWS)]),
            acked=((0, ops),) * len(Kind), failed=(ops,) * len(Kind),
        )  # fmt: skip
        super().__init__(table, config, rank, _NEWS.size + len(encode_facts(most)), listener)
        self.rest_s = self.patience_s = config.interval_s
        self._slowest_s = min(config.heartbeat_s, SLOWEST * config.interval_s)
        self._round = 0
        self._version = -1
        self._facts = self._none  # as they are told in this round
        self._known: object = None
        self._rows: dict[TicketId, Row] = {}  # were told
        self._above: list[set[OpId]] = [set() for _ in Kind]
        self._failed: list[set[OpId]] = [set() for _ in Kind]

    def idle(self) -> bytes:
        """Returns what this rank has to tell, if anything."""
        return self._frame(*(self._vote() or self._text(news=False)))

    def _vote(self) -> tuple[Tag, bytes] | None:
        version = self._table.version
        if version == self._version:
            return None
        self._version = version
        facts = self._facts = self._untold(self._table.facts())
        floors = tuple(floor for floor, _ in facts.acked)
        known = facts.applied, facts.veto, facts.ready, floors
        new = known != self._known or facts.rows or any(above for _, above in facts.acked)
        self._known = known
        return self._text(news=True) if new or any(facts.failed) else None

    def _text(self, *, news: bool) -> tuple[Tag, bytes]:
        text = encode_facts(self._facts)
        return Tag(0, self._round), _NEWS.pack(news, len(text)) + text

    def _count(self, tag: Tag, bodies: Sequence[memoryview]) -> None:
        self._round = tag.number + 1
        self._tell()
        heads = [_NEWS.unpack_from(body) for body in bodies]
        if any(news for news, _ in heads):
            self.patience_s = self.rest_s
        else:
            self.patience_s = min(2 * self.patience_s, self._slowest_s)
        if self._listener is None:
            return
        for rank, (_, length) in enumerate(heads):
            try:
                facts = decode_facts(bodies[rank][_NEWS.size : _NEWS.size + length])
            except ValueError as error:
                raise ConsensusError(
                    f"{self._name(rank)}: its state in round {tag.number} cannot be read: {error}"
                ) from error
            if facts.rank != rank:
                raise ConsensusError(f"{self._name(rank)} told the state of rank {facts.rank}")
            self._listener.state(facts)

    def _untold(self, facts: Facts) -> Facts:
        """Cuts the facts to what is new and fits: the lowest numbers first, the rest later."""
        ended = {row.ticket: row for row in facts.rows if row.final}
        self._rows = {t: row for t, row in self._rows.items() if t in ended}
        fresh = sorted(row for t, row in ended.items() if self._rows.get(t) != row)
        acked, failed = [], []
        for kind in Kind:
            floor, above = facts.acked[kind]
            self._above[kind] &= above
            self._failed[kind] &= facts.failed[kind]
            wrong = sorted(facts.failed[kind] - self._failed[kind])
            right = sorted(above - self._above[kind])
            if len(wrong) > OPS:  # an op that failed must not seem to be a success before it
                limit = wrong[OPS]
                floor, right = min(floor, limit), [op for op in right if op < limit]
            acked.append((floor, frozenset(right[:OPS])))
            failed.append(frozenset(wrong[:OPS]))
        return replace(
            facts, seq=0, rows=frozenset(fresh[:ROWS]), ends={}, acked=tuple(acked),
            failed=tuple(failed),
        )  # fmt: skip

    def _tell(self) -> None:
        """All have heard what was told in this round."""
        facts = self._facts
        if not facts.rows and not any(above for _, above in facts.acked) and not any(facts.failed):
            return
        self._rows.update((row.ticket, row) for row in facts.rows)
        for kind in Kind:
            self._above[kind] |= facts.acked[kind][1]
            self._failed[kind] |= facts.failed[kind]
        floors = tuple((floor, frozenset[int]()) for floor, _ in facts.acked)
        self._facts = replace(facts, rows=frozenset(), acked=floors, failed=self._none.failed)
        self._version = -1  # there may be more than fitted


class _Rank:
    """What one rank has said, merged."""

    def __init__(self) -> None:
        self.seq = 0
        self.changed = False
        self.fresh: set[TicketId] = set()
        self.rows: dict[TicketId, Row] = {}
        self.ends: dict[TicketId, int] = {}
        self.last = Facts(0, 0, 0, 0)
        self.floors = [0 for _ in Kind]
        self.above: list[set[OpId]] = [set() for _ in Kind]
        self.failed: list[set[OpId]] = [set() for _ in Kind]


class Said:
    """The leader's end of the streams: all votes as facts of each rank. Thread-safe.

    A rank's hit counts when it was voted, also the leader's own. A ticket that is open here and was
    not voted on yet has a row of which nothing is known: silence of a rank is never an answer, as
    every rank owes its votes.
    """

    def __init__(self, table: VoteTable, config: Config, incarnation: int) -> None:
        self._table, self._incarnation = table, incarnation
        self._ranks = [_Rank() for _ in range(config.topology.ranks)]
        self._lock = Lock()
        self._next: TicketId = 0

    def hit(self, rank: int, ticket: TicketId, span: int, pages: int, ends: int) -> None:
        """A rank's vote on the hit of a ticket."""
        with self._lock:
            said = self._ranks[rank]
            row = said.rows.get(ticket, Row(ticket, span))
            self._grow(said, row._replace(hit=pages))
            if ends:
                said.ends[ticket] = ends

    def progress(self, rank: int, ticket: TicketId, done: int, groups: int, final: bool) -> None:
        """A rank's vote on its progress with a granted ticket."""
        with self._lock:
            said = self._ranks[rank]
            row = said.rows.get(ticket)
            if row is not None:
                self._grow(said, _more(row, done, groups, final, row.quiet))

    def state(self, facts: Facts) -> None:
        """What is new of a rank beside its votes."""
        with self._lock:
            said = self._ranks[facts.rank]
            said.last, said.changed = facts, True
            for raw in facts.rows:
                new = Row._make(raw)
                row = said.rows.get(new.ticket, Row(new.ticket, new.span))
                self._grow(said, _more(row, new.done, new.groups, new.final, new.quiet))
            for kind in Kind:
                floor, above = facts.acked[kind]
                said.floors[kind] = max(said.floors[kind], floor)
                said.above[kind] |= above
                said.failed[kind] |= facts.failed[kind]

    def facts(self) -> list[Facts]:
        """Returns the facts of each rank of which something is new; by the thread that steps.

        Their rows are the ones that have changed.
        """
        opened, following = self._table.opened()
        ended = self._table.ended()
        with self._lock:
            for ticket in opened:
                if ticket >= self._next:
                    for said in self._ranks:
                        self._grow(said, said.rows.get(ticket, Row(ticket, opened[ticket])))
            self._next = following
            for said in self._ranks:
                for ticket in [t for t in said.rows if t < following and t not in opened]:
                    del said.rows[ticket]
                    said.ends.pop(ticket, None)
                for kind, op in ended:
                    said.above[kind].discard(op)
                    said.failed[kind].discard(op)
            return [
                self._merged(rank, said)
                for rank, said in enumerate(self._ranks)
                if said.changed or said.fresh
            ]

    def _grow(self, said: _Rank, row: Row) -> None:
        said.rows[row.ticket] = row
        said.fresh.add(row.ticket)

    def _merged(self, rank: int, said: _Rank) -> Facts:
        fresh = [ticket for ticket in said.fresh if ticket in said.rows]
        said.fresh.clear()
        said.changed = False
        said.seq += 1
        return replace(
            said.last, incarnation=self._incarnation, rank=rank, seq=said.seq,
            rows=frozenset([said.rows[ticket] for ticket in fresh]),
            ends={ticket: said.ends[ticket] for ticket in fresh if ticket in said.ends},
            acked=tuple(
                (floor, frozenset(above))
                for floor, above in zip(said.floors, said.above, strict=True)
            ),
            failed=tuple(map(frozenset, said.failed)),
        )  # fmt: skip


def _more(row: Row, done: int, groups: int, final: bool, quiet: bool) -> Row:
    return row._replace(
        done=max(row.done, done),
        groups=max(row.groups, groups),
        final=row.final or final,
        quiet=row.quiet or quiet,
    )
