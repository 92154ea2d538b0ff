"""The streams of votes, driven by hand."""

from __future__ import annotations

import pytest

from l3store.consensus.values import Config, Span, Topology
from l3store.consensus.votes import Hits, Progress, VoteTable
from l3store.errors import ConsensusError

CONFIG = Config(Topology(3, pp=3), batch_pages=4, max_pages=20)


def span(pages: int = 10, start: int = 0, *, trailing: bool = False) -> Span:
    sidecars = (("mamba", "trailing_pages"),) if trailing else ()
    return Span(f"r{pages}", 0, start, pages, b"tail", sidecars)


class Heard:
    """What the leader's end is told."""

    def __init__(self) -> None:
        self.hits: list[tuple[int, ...]] = []
        self.reached: list[tuple[object, ...]] = []

    def hit(self, *vote: int) -> None:
        self.hits.append(vote)

    def progress(self, *vote: object) -> None:
        self.reached.append(vote)


class Group:
    """Three ranks with one kind of stream."""

    def __init__(self, kind) -> None:
        self.heard = Heard()
        self.tables = [VoteTable(CONFIG, rank, 1) for rank in range(3)]
        self.streams = [
            kind(table, CONFIG, rank, self.heard if rank == 0 else None)
            for rank, table in enumerate(self.tables)
        ]

    def open(self, ticket: int, spans: list[Span] | None = None) -> None:
        for table, each in zip(self.tables, spans or [span()] * 3, strict=True):
            table.open(ticket, each)

    def apply(self, number: int) -> None:
        for table in self.tables:
            table.applied(number, (), 1, storage_on=True)

    def all(self, method: str, *args: object) -> None:
        for table in self.tables:
            getattr(table, method)(*args)

    def next(self) -> list[bytes | None]:
        return [stream.next() for stream in self.streams]

    def gather(self, *, idle: bool = False) -> None:
        """A round; every rank must owe a vote, or says that it has none yet."""
        frames = [stream.next() or (stream.idle() if idle else None) for stream in self.streams]
        assert None not in frames
        for stream in self.streams:
            stream.take(frames)

    def errors(self, frames: list[bytes]) -> set[str]:
        """What each rank says of a round."""
        found = set()
        for stream in self.streams:
            with pytest.raises(ConsensusError) as raised:
                stream.take(frames)
            found.add(str(raised.value))
        return found


# -- hits


def test_hits_are_voted_in_the_order_of_tickets():
    group = Group(Hits)
    group.open(0)
    group.open(1)
    group.all("hit", 1, 7)
    assert group.next() == [None] * 3
    for rank, table in enumerate(group.tables):
        table.hit(0, rank)
    group.gather()
    group.gather()
    digest = span().digest
    assert group.heard.hits == [
        (0, 0, digest, 0, 0), (1, 0, digest, 1, 0), (2, 0, digest, 2, 0),
        (0, 1, digest, 7, 0), (1, 1, digest, 7, 0), (2, 1, digest, 7, 0),
    ]  # fmt: skip
    assert group.next() == [None] * 3


def test_end_points_go_with_the_hit():
    group = Group(Hits)
    group.open(0, [span(20, trailing=True)] * 3)
    for rank, table in enumerate(group.tables):
        table.hit(0, 20, 1 << 20 | 1 << rank | 1)
    group.gather()
    assert [vote[4] for vote in group.heard.hits] == [1 << 20 | 1, 1 << 20 | 3, 1 << 20 | 5]


def test_a_ticket_that_ended_owes_its_vote_all_the_same():
    group = Group(Hits)
    for ticket in range(3):
        group.open(ticket)
    group.tables[0].hit(0, 5)  # had its answer, the others not
    group.all("close", 0)
    group.all("close", 1)
    group.all("hit", 2, 3)
    for _ in range(3):
        group.gather()
    assert [vote[3] for vote in group.heard.hits] == [5, 0, 0, 0, 0, 0, 3, 3, 3]
    assert not any(table._left for table in group.tables)


def test_who_declines_or_fails_votes_0():
    group = Group(Hits)
    group.open(0)
    group.tables[0].decline(0)
    group.tables[1].finish(0)
    group.tables[2].hit(0, 9)
    group.gather()
    assert [vote[3] for vote in group.heard.hits] == [0, 0, 9]


def test_a_round_in_which_a_rank_has_no_vote_yet_is_held_again():
    group = Group(Hits)
    group.open(0)
    group.tables[0].hit(0, 4)
    group.tables[1].hit(0, 5)
    group.gather(idle=True)
    assert group.heard.hits == []
    group.tables[2].hit(0, 6)
    group.gather()
    assert [vote[3] for vote in group.heard.hits] == [4, 5, 6]


def test_another_span_is_named_alike_on_every_rank():
    group = Group(Hits)
    group.apply(6)
    group.open(0, [span(10, 5), span(12, 3), span(10, 5)])
    group.all("hit", 0, 1)
    assert group.errors(group.next()) == {
        "ticket 0, submitted in step 6: rank 1 (pp 1, cp 0, tp 0) has another span than rank 0 "
        "(pp 0, cp 0, tp 0); the ranks' inputs or trees differ"
    }


def test_votes_that_do_not_pair_name_what_each_rank_votes_on():
    group = Group(Hits)
    group.apply(9)
    group.open(0)
    group.all("hit", 0, 1)
    first = group.next()
    group.gather()
    group.open(1)
    group.all("hit", 1, 1)
    second = group.next()
    assert group.errors([second[0], second[1], first[2]]) == {
        "the votes on hits do not pair, in step 9: rank 0 (pp 0, cp 0, tp 0) votes on ticket 1, "
        "vote 0, rank 2 (pp 2, cp 0, tp 0) on ticket 0, vote 0; a rank left a vote out or made one "
        "too many"
    }


def test_a_slip_is_seen_beside_a_rank_that_has_no_vote_yet():
    group = Group(Hits)
    group.open(0)
    group.all("hit", 0, 1)
    first = group.next()
    group.gather()
    group.open(1)
    group.all("hit", 1, 1)
    second = group.next()
    said = group.errors([group.streams[0].idle(), second[1], first[2]])
    assert all("rank 1 (pp 1, cp 0, tp 0) votes on ticket 1" in text for text in said)


def test_a_vote_of_another_purpose_or_length_is_refused():
    hits, progress = Group(Hits), Group(Progress)
    hits.open(0)
    hits.all("hit", 0, 1)
    frames = hits.next()
    other = progress.streams[1].idle().ljust(hits.streams[0].size, b"\0")
    assert hits.errors([frames[0], other, frames[2]]) == {
        "rank 1 (pp 1, cp 0, tp 0) voted on progress where hits is voted on, in step 0"
    }
    size = hits.streams[0].size
    assert hits.errors([frames[0], frames[1], frames[2] + b"\0"]) == {
        f"rank 2 (pp 2, cp 0, tp 0) sent {size + 1} bytes as its vote on hits; a vote has {size}"
    }


# -- progress


def granted(pages: int) -> Group:
    group = Group(Progress)
    group.open(0)
    group.all("hit", 0, 10)
    group.all("granted", 0, pages)
    assert all(table.enter(0) for table in group.tables)
    return group


def rounds(group: Group) -> int:
    """Returns how many votes every rank owes as of now."""
    count = 0
    while None not in group.next():
        group.gather()
        count += 1
    return count


def test_the_number_of_votes_is_that_of_the_batches_of_the_grant():
    group = granted(9)
    for pages, votes in ((3, 0), (4, 1), (7, 0), (8, 1), (9, 1)):
        group.all("progress", 0, pages)
        assert rounds(group) == votes
    assert group.tables[0].grant() is None
    assert [vote[2] for vote in group.heard.reached] == [4, 4, 4, 8, 8, 8, 9, 9, 9]


def test_votes_end_when_they_show_that_nothing_more_can_come():
    group = granted(10)
    group.tables[0].progress(0, 10)
    group.tables[1].finish(0)  # it found no memory
    group.tables[2].progress(0, 4)
    assert rounds(group) == 1
    assert group.heard.reached == [(0, 0, 10, 0, False), (1, 0, 0, 0, True), (2, 0, 4, 0, False)]
    assert group.tables[0].grant() is None


def test_who_is_final_early_still_votes_until_the_others_have_come_as_far():
    group = granted(10)
    group.tables[0].progress(0, 10, 3)
    group.tables[1].progress(0, 6)
    group.tables[1].finish(0)
    group.tables[2].progress(0, 4)
    assert rounds(group) == 1
    group.tables[2].progress(0, 8)
    assert rounds(group) == 1
    assert group.tables[0].grant() is None
    assert group.heard.reached[-3:] == [
        (0, 0, 10, 3, False),
        (1, 0, 6, 0, True),
        (2, 0, 8, 0, False),
    ]


def test_a_ticket_that_is_settled_owes_one_more_vote_and_then_none():
    group = granted(10)
    group.open(1)
    group.all("hit", 1, 2)
    group.all("granted", 1, 2)
    group.all("settle", 0)  # aborted: nobody has read anything
    assert rounds(group) == 1
    assert group.tables[0].grant() == 1
    group.all("enter", 1)
    group.all("progress", 1, 2)
    assert rounds(group) == 1
    assert [vote[1] for vote in group.heard.reached] == [0, 0, 0, 1, 1, 1]


def test_progress_is_voted_in_the_order_of_grants_and_after_the_end():
    group = Group(Progress)
    for ticket in range(2):
        group.open(ticket)
        group.all("hit", ticket, 4)
    group.all("granted", 1, 4)
    group.all("granted", 0, 4)
    group.all("enter", 0)
    group.all("progress", 0, 4)
    assert rounds(group) == 0
    group.all("leave", 0)
    for ticket in (1, 0):
        group.all("settle", ticket)
        group.all("close", ticket)
    assert rounds(group) == 2
    assert [vote[1] for vote in group.heard.reached] == [1, 1, 1, 0, 0, 0]


def test_batches_are_counted_from_the_start_of_each_ticket():
    group = granted(9)
    group.open(1)
    group.all("hit", 1, 9)
    group.all("granted", 1, 9)
    for pages in (4, 8, 9):
        group.all("progress", 0, pages)
        assert rounds(group) == 1
    group.all("enter", 1)
    group.all("progress", 1, 4)
    assert rounds(group) == 1
    assert group.heard.reached[-1] == (2, 1, 4, 0, False)


def test_progress_is_owed_also_if_the_ticket_ended_before_its_hits_came_in():
    group = granted(4)
    group.all("settle", 0)
    group.all("leave", 0)
    group.all("close", 0)
    group.all("voted_hit", 0)
    assert rounds(group) == 1
    assert not any(table._left for table in group.tables)
