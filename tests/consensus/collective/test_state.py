"""What goes round beside votes: nothing is lost or told twice, and an idle group is slow."""

from __future__ import annotations

import pytest

from l3store.consensus.state import OPS, ROWS, SLOWEST, Said, State
from l3store.consensus.values import UNLIMITED, Config, Facts, Kind, Span, Topology
from l3store.consensus.votes import VoteTable
from l3store.errors import ConsensusError

CONFIG = Config(Topology(2, tp=2), heartbeat_s=1.0)
INCARNATION = 7


class Heard:
    """Facts as they come in."""

    def __init__(self) -> None:
        self.told: list[Facts] = []

    def state(self, facts: Facts) -> None:
        self.told.append(facts)


class Pair:
    """Two ranks; the first one leads."""

    def __init__(self) -> None:
        self.tables = [VoteTable(CONFIG, rank, INCARNATION) for rank in range(2)]
        self.said = Said(self.tables[0], CONFIG, INCARNATION)
        self.heard = Heard()
        self.streams = [
            State(self.tables[0], CONFIG, 0, self.said),
            State(self.tables[1], CONFIG, 1, self.heard),
        ]

    def gather(self) -> list[Facts]:
        """Holds a round; returns what rank 1 has told in it."""
        frames = [stream.next() or stream.idle() for stream in self.streams]
        for stream in self.streams:
            stream.take(frames)
        return [facts for facts in self.heard.told[-2:] if facts.rank == 1]

    def open(self, count: int, pages: int = 10) -> None:
        for ticket in range(count):
            for table in self.tables:
                table.open(ticket, Span(f"r{ticket}", 0, 0, pages, b"tail"))


def test_what_was_gathered_is_not_told_again():
    pair = Pair()
    pair.open(1)
    pair.tables[1].finish(0)
    pair.tables[1].issued(Kind.BACKUP, 0)
    pair.tables[1].issued(Kind.BACKUP, 1)
    pair.tables[1].ack(Kind.BACKUP, 1, ok=False)
    (first,) = pair.gather()
    assert {row[0] for row in first.rows} == {0}
    assert first.acked[Kind.BACKUP] == (0, {1})
    assert first.failed[Kind.BACKUP] == {1}
    (second,) = pair.gather()
    assert not second.rows
    assert not second.failed[Kind.BACKUP]
    assert second.acked[Kind.BACKUP] == (0, set())


def test_a_row_is_told_when_it_has_ended():
    pair = Pair()
    pair.open(2)
    pair.tables[1].hit(0, 4)
    assert not pair.gather()[0].rows
    pair.tables[1].finish(0)
    assert {row[0] for row in pair.gather()[0].rows} == {0}
    pair.tables[1].settle(0)  # now it is quiet, which is new
    assert [row[-1] for row in pair.gather()[0].rows] == [True]


def test_what_does_not_fit_comes_in_later_rounds_the_lowest_first():
    pair = Pair()
    count = 2 * ROWS + 5
    pair.open(count)
    for ticket in range(count):
        pair.tables[1].finish(ticket)
    told = [sorted(row[0] for row in pair.gather()[0].rows) for _ in range(4)]
    assert told == [
        list(range(ROWS)), list(range(ROWS, 2 * ROWS)), list(range(2 * ROWS, count)), [],
    ]  # fmt: skip


def test_a_failure_never_looks_like_a_success_while_the_rest_does_not_fit():
    pair = Pair()
    count = 3 * OPS
    for table in pair.tables:
        for op in range(count):
            table.issued(Kind.BACKUP, op)
            table.ack(Kind.BACKUP, op, ok=op % 2 == 0)
    for number in range(5):
        pair.gather()
        for facts in pair.said.facts():
            floor, above = facts.acked[Kind.BACKUP]
            ended = {*range(floor), *above}
            assert {op for op in ended if op % 2} <= facts.failed[Kind.BACKUP]
            assert number < 2 or (floor == count and len(facts.failed[Kind.BACKUP]) == count // 2)


def test_the_most_that_is_told_fits_into_a_frame():
    pair = Pair()
    pair.open(ROWS + 1)
    table = pair.tables[1]
    table.applied(CONFIG.window, tuple(range(CONFIG.window)), 1, storage_on=True)
    for ticket in range(ROWS + 1):
        table.finish(ticket)
    for kind in Kind:
        for op in range(2 * OPS):
            table.issued(kind, op)
            if op or kind.in_order:
                table.ack(kind, op, ok=op % 2 == 0)
    frame = pair.streams[1].next()
    assert len(frame) == pair.streams[1].size
    (facts,) = pair.gather()
    assert len(facts.rows) == ROWS
    assert len(facts.failed[Kind.BACKUP]) == len(facts.acked[Kind.BACKUP][1]) == OPS


def test_one_pace_for_all_slow_when_nobody_has_news():
    pair = Pair()
    pair.gather()
    assert [stream.patience_s for stream in pair.streams] == [CONFIG.interval_s] * 2
    for _ in range(12):
        pair.gather()
    slowest = SLOWEST * CONFIG.interval_s
    assert [stream.patience_s for stream in pair.streams] == [slowest] * 2
    assert pair.streams[0].next() is None
    pair.tables[1].ready()
    assert pair.streams[0].next() is None
    frames = [pair.streams[0].idle(), pair.streams[1].next()]
    for stream in pair.streams:
        stream.take(frames)
    assert [stream.patience_s for stream in pair.streams] == [CONFIG.interval_s] * 2


def test_a_change_that_is_not_told_here_is_no_news():
    pair = Pair()
    pair.open(1)
    for _ in range(3):
        pair.gather()
    pair.tables[1].hit(0, 3)
    assert pair.streams[1].next() is None


def test_rounds_pair_by_number():
    pair = Pair()
    first = [stream.next() or stream.idle() for stream in pair.streams]
    pair.gather()
    second = [stream.next() or stream.idle() for stream in pair.streams]
    with pytest.raises(ConsensusError, match=r"votes on state do not pair.*rank 1 .*vote 0"):
        pair.streams[0].take([second[0], first[1]])


def test_a_state_that_cannot_be_read_is_named():
    pair = Pair()
    frames = [stream.next() or stream.idle() for stream in pair.streams]
    broken = frames[1].replace(b"L3CS", b"L4CS")
    assert broken != frames[1]
    with pytest.raises(ConsensusError, match=r"rank 1 .*: its state in round 0 cannot be read"):
        pair.streams[0].take([frames[0], broken])
    with pytest.raises(ConsensusError, match=r"rank 1 .* told the state of rank 0"):
        pair.streams[0].take([frames[0], frames[0]])


# -- the leader's end


def test_silence_about_a_ticket_is_no_answer():
    pair = Pair()
    pair.open(1)
    for facts in pair.said.facts():
        (row,) = facts.rows
        assert (row.hit, row.final, row.quiet) == (UNLIMITED, False, False)
    assert pair.said.facts() == []


def test_a_hit_counts_when_it_was_voted_not_when_its_row_has_ended():
    pair = Pair()
    pair.open(1)
    pair.tables[1].hit(0, 4)
    pair.tables[1].finish(0)
    pair.gather()
    row = {facts.rank: next(iter(facts.rows)) for facts in pair.said.facts()}[1]
    assert (row.hit, row.final) == (UNLIMITED, True)
    pair.said.hit(1, 0, row.span, 4, 0b10001)
    (facts,) = pair.said.facts()
    assert next(iter(facts.rows)).hit == 4
    assert facts.ends == {0: 0b10001}


def test_votes_that_come_late_take_nothing_back():
    pair = Pair()
    pair.open(1)
    pair.tables[1].granted(0, 10)
    assert pair.tables[1].enter(0)
    for pages in (3, 8):
        pair.tables[1].progress(0, pages, 2)
    pair.tables[1].finish(0)
    pair.gather()
    pair.said.progress(1, 0, 3, 1, False)
    row = {facts.rank: next(iter(facts.rows)) for facts in pair.said.facts()}[1]
    assert (row.done, row.groups, row.final) == (8, 2, True)


def test_what_has_ended_for_all_is_forgotten():
    pair = Pair()
    pair.open(3)
    for table in pair.tables:
        table.issued(Kind.BACKUP, 0)
        table.issued(Kind.BACKUP, 1)
        table.ack(Kind.BACKUP, 1, ok=False)
    pair.gather()
    pair.said.facts()
    for table in pair.tables:
        for ticket in range(3):
            table.close(ticket)
        table.consumed(Kind.BACKUP, 1)
    pair.said.hit(1, 2, 5, 1, 1)  # a vote on a ticket that ended
    pair.said.progress(1, 0, 1, 0, True)
    pair.gather()
    pair.said.facts()
    for rank in pair.said._ranks:
        assert not rank.rows
        assert not rank.ends
        assert not rank.above[Kind.BACKUP]
        assert not rank.failed[Kind.BACKUP]
