"""Votes: what a rank owes the others under `collective`, as frames of one shape. No thread, no I/O.

A `Stream` is the votes of one purpose in their order. Every rank owes the same votes in the same
order, whatever happens on it: how many there are is taken from what all have decided or gathered,
never from what one rank has. So the votes pair by their place alone, and each carries its tag to
prove it. Whoever drives a stream gives the frame of `next` to an all-gather and the frames of all
ranks to `take`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

from l3store.consensus.table import FactTable
from l3store.consensus.values import UNLIMITED
from l3store.errors import ConsensusError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.consensus.table import _Open
    from l3store.consensus.values import Config, Facts, Kind, OpId, Span, TicketId

__all__ = ["Ballot", "Hits", "Listener", "Progress", "Reached", "Stream", "Tag", "VoteTable"]


class Ballot(NamedTuple):
    """What this rank knows of a ticket when it votes."""

    span: int
    """Digest of the span."""
    step: int
    """In which it was submitted."""
    hit: int
    """`UNLIMITED`: not known yet."""
    ends: int
    granted: int
    done: int
    groups: int
    final: bool
    settled: bool
    """Here or for all: what it has reached does not matter any more."""


class VoteTable(FactTable):
    """Facts that also know which votes are owed: a ticket that ended owes its votes all the same.

    Thread-safe, as `FactTable` is.
    """

    def __init__(self, config: Config, rank: int, incarnation: int) -> None:
        super().__init__(config, rank, incarnation)
        self._left: dict[TicketId, _Open] = {}  # ended, and a vote on it is owed
        self._hits_voted: TicketId = 0
        self._grants: deque[TicketId] = deque()
        self._ended: list[tuple[Kind, OpId]] = []

    @property
    def step(self) -> int:
        """Number of the last record that was applied here."""
        return self._applied

    def open(self, ticket: TicketId, span: Span) -> None:
        """Begins the row of a ticket; it is never taken back, as a vote is owed from now on."""
        with self._changing():
            super().open(ticket, span)
            self._tickets[ticket].said = True

    def granted(self, ticket: TicketId, pages: int) -> None:
        """The grant was applied here: votes on progress are owed, in the order of the grants."""
        with self._changing():
            super().granted(ticket, pages)
            self._grants.append(ticket)

    def close(self, ticket: TicketId) -> None:
        """The ticket has ended for all; what was known of it is kept until the last vote."""
        with self._changing():
            row = self._tickets.get(ticket)
            super().close(ticket)
            if row is not None and (ticket >= self._hits_voted or ticket in self._grants):
                row.settled = True
                self._left[ticket] = row

    def consumed(self, kind: Kind, op: OpId) -> None:
        """The operation has ended for all."""
        super().consumed(kind, op)
        if self._rank == 0:
            self._ended.append((kind, op))

    def ended(self) -> list[tuple[Kind, OpId]]:
        """Leader: returns the operations that were consumed since the last call; as `consumed`."""
        ended, self._ended = self._ended, []
        return ended

    def ballot(self, ticket: TicketId) -> Ballot | None:
        """Returns what is known of a ticket on which a vote is owed; None: it is not open yet."""
        with self._lock:
            row = self._tickets.get(ticket) or self._left.get(ticket)
            if row is None:
                return None
            return Ballot(
                row.span.digest, row.step, row.hit, row.ends, row.granted, row.done, row.groups,
                row.final or (row.settled and not row.calls), row.settled,
            )  # fmt: skip

    def opened(self) -> tuple[dict[TicketId, int], TicketId]:
        """Returns the open tickets with the digests of their spans, and the next id."""
        with self._lock:
            return {t: row.span.digest for t, row in self._tickets.items()}, self._next_ticket

    def grant(self) -> TicketId | None:
        """Returns the first granted ticket on which a vote on progress is owed."""
        with self._lock:
            return self._grants[0] if self._grants else None

    def voted_hit(self, ticket: TicketId) -> None:
        """All have voted on the hit of this ticket, and of all before it."""
        with self._lock:
            self._hits_voted = ticket + 1
            if ticket not in self._grants:
                self._left.pop(ticket, None)

    def voted_progress(self) -> None:
        """All votes on the progress of the first granted ticket were made."""
        with self._lock:
            self._left.pop(self._grants.popleft(), None)


class Listener(Protocol):
    """Who makes something of gathered votes: the leader's end. Called by the streams' threads."""

    def hit(self, rank: int, ticket: TicketId, span: int, pages: int, ends: int) -> None:
        """A rank's vote on the hit of a ticket."""
        ...

    def progress(self, rank: int, ticket: TicketId, done: int, groups: int, final: bool) -> None:
        """A rank's vote on its progress with a granted ticket."""
        ...

    def state(self, facts: Facts) -> None:
        """What is new of a rank's acks, epochs, ended rows and applied records."""
        ...


class Tag(NamedTuple):
    """Which vote it is."""

    ticket: TicketId
    number: int
    """Of the vote among those of one ticket, or of the round."""


_HEAD = Struct("<B?QQ")
"""Purpose, whether there is a vote, and its tag."""
PURPOSES = ("hits", "progress", "state")


class Stream(ABC):
    """The votes of one purpose, in their order. Used by one thread, or one simulator.

    Attributes:
        size: Of each frame, in bytes.
        patience_s: If `next` has nothing for so long, `idle` is sent: a group that is waited for
            must show that it is alive.
        rest_s: From one round to the next at least.
    """

    purpose: str
    rest_s = 0.0

    def __init__(
        self, table: VoteTable, config: Config, rank: int, body: int, listener: Listener | None
    ) -> None:
        self.size = _HEAD.size + body
        self.patience_s = config.heartbeat_s
        self._code = PURPOSES.index(self.purpose)
        self._table, self._config, self._rank, self._listener = table, config, rank, listener
        self._name = config.topology.name

    def next(self) -> bytes | None:
        """Returns the vote that this rank owes next; None: what it is on is not reached yet."""
        vote = self._vote()
        return None if vote is None else self._frame(*vote)

    def idle(self) -> bytes:
        """Returns the frame that says: no vote yet. A round with one is held again."""
        return self._frame(Tag(0, 0), b"", voted=False)

    def take(self, frames: Sequence[bytes]) -> None:
        """Takes in the frames of one round.

        Args:
            frames: Of all ranks, by rank.

        Raises:
            ConsensusError: They are not votes on the same thing: purpose, ticket, step and the
                ranks that differ are named, alike on every rank.
        """
        bodies: list[memoryview] = []
        tags: dict[int, Tag] = {}
        for rank, frame in enumerate(frames):
            if len(frame) != self.size:
                raise ConsensusError(
                    f"{self._name(rank)} sent {len(frame)} bytes as its vote on {self.purpose}; a "
                    f"vote has {self.size}"
                )
            code, voted, ticket, number = _HEAD.unpack_from(frame)
            if code != self._code:
                other = PURPOSES[code] if code < len(PURPOSES) else f"purpose {code}"
                raise ConsensusError(
                    f"{self._name(rank)} voted on {other} where {self.purpose} is voted on, in "
                    f"step {self._table.step}"
                )
            if voted:
                tags[rank] = Tag(ticket, number)
            bodies.append(memoryview(frame)[_HEAD.size :])
        self._compare(tags)
        if len(tags) == len(frames):
            self._count(tags[self._rank], bodies)

    def _frame(self, tag: Tag, body: bytes, *, voted: bool = True) -> bytes:
        return (_HEAD.pack(self._code, voted, *tag) + body).ljust(self.size, b"\0")

    def _compare(self, tags: dict[int, Tag]) -> None:
        if len(set(tags.values())) < 2:
            return
        first = min(tags)
        others = [rank for rank in tags if tags[rank] != tags[first]]
        told = ", ".join(f"{self._name(rank)} on {self._what(tags[rank])}" for rank in others)
        raise ConsensusError(
            f"the votes on {self.purpose} do not pair, in step {self._table.step}: "
            f"{self._name(first)} votes on {self._what(tags[first])}, {told}; a rank left a vote "
            f"out or made one too many"
        )

    def _what(self, tag: Tag) -> str:
        return f"ticket {tag.ticket}, vote {tag.number}"

    @abstractmethod
    def _vote(self) -> tuple[Tag, bytes] | None:
        """Returns the next vote, if it is due."""

    @abstractmethod
    def _count(self, tag: Tag, bodies: Sequence[memoryview]) -> None:
        """Every rank has voted."""


_HIT = Struct("<QL")
"""Digest of the span, hit; behind them a set of end points."""


class Hits(Stream):
    """One vote a ticket, in the order of tickets: the hit, or 0 of a rank that takes no part.

    Owed for every ticket that was ever opened, also if it was aborted before, or the query failed.
    """

    purpose = "hits"

    def __init__(
        self, table: VoteTable, config: Config, rank: int, listener: Listener | None = None
    ) -> None:
        self._ends_size = config.max_pages // 8 + 1  # 0 pages are an end point too
        super().__init__(table, config, rank, _HIT.size + self._ends_size, listener)
        self._ticket: TicketId = 0

    def _vote(self) -> tuple[Tag, bytes] | None:
        ballot = self._table.ballot(self._ticket)
        if ballot is None or (ballot.hit == UNLIMITED and not ballot.settled):
            return None
        hit = 0 if ballot.hit == UNLIMITED else ballot.hit
        body = _HIT.pack(ballot.span, hit) + ballot.ends.to_bytes(self._ends_size, "little")
        return Tag(self._ticket, 0), body

    def _count(self, tag: Tag, bodies: Sequence[memoryview]) -> None:
        votes = [_HIT.unpack_from(body) for body in bodies]
        others = [rank for rank, (span, _) in enumerate(votes) if span != votes[0][0]]
        if others:
            ballot = self._table.ballot(tag.ticket)
            raise ConsensusError(
                f"ticket {tag.ticket}, submitted in step {ballot.step if ballot else '?'}: "
                f"{', '.join(map(self._name, others))} {'has' if len(others) == 1 else 'have'} "
                f"another span than {self._name(0)}; the ranks' inputs or trees differ"
            )
        if self._listener:
            for rank, (span, hit) in enumerate(votes):
                ends = int.from_bytes(bodies[rank][_HIT.size :], "little")
                self._listener.hit(rank, tag.ticket, span, hit, ends)
        self._table.voted_hit(tag.ticket)
        self._ticket = tag.ticket + 1


class Reached(NamedTuple):
    """A vote on progress."""

    done: int
    groups: int
    final: bool
    settled: bool


_REACHED = Struct("<LL??")


class Progress(Stream):
    """Votes on the pages that were read: one a batch of the agreed grant, in the order of grants.

    A vote is due when its batch was read, or nothing more will be, or nothing more matters. Owed
    also by a rank that reads nothing.
    """

    purpose = "progress"

    def __init__(
        self, table: VoteTable, config: Config, rank: int, listener: Listener | None = None
    ) -> None:
        super().__init__(table, config, rank, _REACHED.size, listener)
        self._number = 0

    def _vote(self) -> tuple[Tag, bytes] | None:
        ticket = self._table.grant()
        ballot = None if ticket is None else self._table.ballot(ticket)
        if ticket is None or ballot is None:
            return None
        due = min((self._number + 1) * self._config.batch_pages, ballot.granted)
        if ballot.done < due and not ballot.final and not ballot.settled:
            return None
        body = _REACHED.pack(ballot.done, ballot.groups, ballot.final, ballot.settled)
        return Tag(ticket, self._number), body

    def _count(self, tag: Tag, bodies: Sequence[memoryview]) -> None:
        votes = [Reached._make(_REACHED.unpack_from(body)) for body in bodies]
        if self._listener:
            for rank, vote in enumerate(votes):
                self._listener.progress(rank, tag.ticket, vote.done, vote.groups, vote.final)
        if self._over(tag, votes):
            self._table.voted_progress()
            self._number = 0
        else:
            self._number += 1

    def _over(self, tag: Tag, votes: Sequence[Reached]) -> bool:
        """Whether no further vote on the ticket is held: alike on every rank.

        Only the grant, which all have agreed on, and gathered votes go in. The last batch's vote is
        always the last: each rank has then read all of the grant, or ended.
        """
        ballot = self._table.ballot(tag.ticket)
        granted = ballot.granted if ballot else 0
        ended = [vote.done for vote in votes if vote.final]
        most = min(granted, *ended) if ended else granted
        return min(vote.done for vote in votes) >= most or any(vote.settled for vote in votes)
