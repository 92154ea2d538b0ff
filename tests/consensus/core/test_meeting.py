"""The leader's part: MIN of what is known, the newest of each rank, and who differs by name."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l3store.consensus.meeting import Meeting, join, meet
from l3store.consensus.protocol import Machine
from l3store.consensus.values import (
    ALL_ENDS,
    UNLIMITED,
    Acks,
    Bounds,
    Consume,
    Facts,
    Grant,
    Kind,
    Release,
    Row,
    Settle,
    Storage,
)
from l3store.consensus.wire import encode_record
from l3store.errors import ConsensusError

# -- meet -----------------------------------------------------------------------------------------

PAGES = st.integers(0, 9)
ROWS = st.builds(
    lambda hit, done, groups, final, settled: Row(
        0, 1, hit, done, groups, final or settled, settled
    ),
    PAGES | st.just(UNLIMITED), PAGES, PAGES, st.booleans(), st.booleans(),
)  # fmt: skip
MANY = st.lists(st.none() | ROWS, min_size=1, max_size=5)


def _hit(row):
    return 0 if row is None or row.hit == UNLIMITED else row.hit


@given(MANY)
def test_low_is_what_every_rank_has_and_high_what_every_rank_may_come_to_have(rows):
    """History 3: an unknown number is 0 for use and unlimited for verdicts."""
    bounds = meet(rows)
    assert bounds.hit_low == min(map(_hit, rows))
    assert bounds.hit_high == min(UNLIMITED if row is None else row.hit for row in rows)
    assert bounds.done_low == min(row.done if row else 0 for row in rows)
    assert bounds.done_high == min(
        (row.done for row in rows if row and row.final), default=UNLIMITED
    )
    assert bounds.groups == min(row.groups if row else 0 for row in rows)
    assert bounds.quiet == all(row is not None and row.quiet for row in rows)


@given(MANY.filter(lambda rows: len(rows) < 5), st.lists(st.integers(1, 63), max_size=5))
def test_the_order_of_ranks_does_not_matter(rows, ends):
    assert {meet(list(each), ends[::-1]) for each in permutations(rows)} == {meet(rows, ends)}


@given(MANY, st.data())
def test_a_rank_that_reaches_more_never_takes_anything_back(rows, data):
    """Low only grows and high only falls: what was decided on them stays right."""
    at = data.draw(st.integers(0, len(rows) - 1))
    old = rows[at]
    if old is None:
        new = data.draw(ROWS)
    else:
        new = old._replace(
            hit=data.draw(PAGES) if old.hit == UNLIMITED else old.hit,
            done=old.done if old.final else data.draw(st.integers(old.done, 9)),
            groups=data.draw(st.integers(old.groups, 9)),
            final=old.final or data.draw(st.booleans()),
            quiet=old.quiet,
        )
    before, after = meet(rows), meet([*rows[:at], new, *rows[at + 1 :]])
    for name in ("hit_low", "done_low", "groups", "quiet"):
        assert getattr(after, name) >= getattr(before, name)
    assert after.hit_high <= before.hit_high


@given(st.lists(st.integers(0, 63), min_size=1, max_size=4))
def test_end_points_are_those_of_all_ranks_once_all_have_answered(ends):
    rows = [Row(0, 1, hit=5)] * len(ends)
    legal = {n for n in range(6) if all(bits >> n & 1 for bits in ends)}
    assert {n for n in range(6) if meet(rows, ends).ends >> n & 1} == legal
    assert meet([*rows, None], [*ends, 0]).ends == ALL_ENDS
    assert meet([*rows, Row(0, 1)], [*ends, 0]).ends == ALL_ENDS


def test_nothing_is_known_of_nobody():
    assert meet([None, None]) == Bounds()


@pytest.mark.parametrize(("hits", "low"), [((896, 0), 0), ((896, 0, 512), 0), ((896, 896), 896)])
def test_a_hit_is_agreed_when_both_bounds_are_equal(hits, low):
    bounds = meet([Row(0, 1, hit=hit) for hit in hits])
    assert (bounds.hit_low, bounds.hit_high) == (low, low)


# -- hearing --------------------------------------------------------------------------------------


@pytest.fixture
def talk(make):
    return make.talk()


def test_the_newest_report_counts_in_whatever_order_they_come(make, talk):
    """History 7: report 7 overtaken by 8."""
    ticket = talk.submit()
    first, table = talk.tables
    for each in talk.tables:
        each.hit(ticket, 10)
    assert talk.step() == [Grant(ticket, 10)]
    older = table.facts()
    make.read(table, ticket, 4)
    newer = table.facts()
    assert talk.meeting.hear(newer)
    assert not talk.meeting.hear(older)
    assert not talk.meeting.hear(newer)
    assert ticket not in talk.decide(0).rows  # rank 0 has read nothing
    make.read(first, ticket, 9)
    assert talk.decide(0).rows[ticket].done_low == 4


def test_a_report_of_another_group_or_rank_is_not_heard(talk):
    facts = talk.tables[1].facts()
    assert not talk.meeting.hear(replace(facts, incarnation=8, seq=99))
    assert not talk.meeting.hear(replace(facts, rank=2, seq=99))
    assert talk.meeting.hear(facts)


@pytest.mark.parametrize(
    "taken",
    [{"hit": 4}, {"hit": UNLIMITED}, {"done": 3}, {"groups": 0}, {"final": False}, {"quiet": False},
     {"span": 8}, {"done": 6}],
    ids=repr,
)  # fmt: skip
def test_a_rank_that_takes_a_fact_back_is_named(talk, taken):
    """History 2: no fact ever goes back. Nor does what was final go on."""
    ticket = talk.submit()
    row = Row(ticket, 5, hit=5, done=5, groups=1, final=True, quiet=True)
    said = replace(talk.tables[1].facts(), rows=frozenset({row}))
    assert talk.meeting.hear(said)
    taken_back = replace(said, seq=said.seq + 1, rows=frozenset({row._replace(**taken)}))
    with pytest.raises(ConsensusError, match=r"rank 1 .*tp 1\) took back what it said of ticket 0"):
        talk.meeting.hear(taken_back)


@pytest.mark.parametrize(
    "taken",
    [
        {"applied": 4},
        {"veto": 1},
        {"ready": 2},
        {"acked": ((2, frozenset()), (2, frozenset()), (1, frozenset()))},
    ],
    ids=repr,
)
def test_a_rank_whose_numbers_go_back_is_named(talk, taken):
    said = Facts(7, 1, 50, 5, acked=((2, frozenset()),) * 3, veto=2, ready=3)
    assert talk.meeting.hear(said)
    with pytest.raises(ConsensusError, match=r"rank 1 .* took back what it said: applied"):
        talk.meeting.hear(replace(said, seq=51, **taken))


def test_reached_and_applied_tell_how_far_ranks_are(make):
    talk = make.talk(3)
    for _ in range(3):
        talk.step()
    talk.hear(0, 2)
    assert [talk.meeting.reached(rank) for rank in range(3)] == [4, 3, 4]
    assert talk.meeting.applied() == 3
    assert Meeting(talk.config, 7).applied() == 0


# -- rows -----------------------------------------------------------------------------------------


def test_a_record_names_only_what_has_changed(talk):
    ticket = talk.submit()
    assert talk.decide().rows == {}
    talk.step()
    talk.tables[0].hit(ticket, 3)
    assert talk.decide().rows == {ticket: Bounds(hit_high=3)}
    talk.apply(talk.meeting.decide(talk.machine, 0.0))
    assert talk.decide().rows == {}


def test_a_rank_that_never_shows_a_ticket_has_answered_with_nothing(talk):
    """History 5: it has applied a record after the submit, and has no row."""
    ticket = talk.submit(on=[0])
    talk.tables[0].hit(ticket, 10)
    assert talk.step() == []  # rank 1 may not have come to the submit yet
    talk.hear()
    assert talk.step() == [Settle(ticket, 0, 0, "short")]


def test_a_rank_that_is_late_with_its_row_is_waited_for(talk):
    """History 5, the other side: without a later record it has not answered."""
    ticket = talk.submit(on=[0])
    talk.tables[0].hit(ticket, 10)
    for _ in range(4):
        assert talk.step(0) == []  # rank 1 is silent
    assert talk.machine.tickets[ticket].bounds == Bounds(hit_high=10)


def test_a_row_that_comes_before_the_leaders_own_submit_is_kept(make):
    talk = make.talk()
    asked = make.span()
    talk.tables[1].open(0, asked)
    talk.tables[1].hit(0, 6)
    talk.step()
    ticket = talk.machine.submit(asked)
    talk.tables[0].open(ticket, asked)
    talk.tables[0].hit(ticket, 8)
    assert talk.step(0) == [Grant(ticket, 6)]


def test_unequal_spans_are_named_with_ticket_step_and_rank(make):
    """History 15: (5..15) and (3..15) under one ticket."""
    talk = make.talk(3)
    talk.submit(make.span("a"))
    talk.step()
    ticket = talk.machine.submit(make.span("b", start=5, pages=10))
    for rank, table in enumerate(talk.tables):
        table.open(ticket, make.span("b", start=3 if rank == 2 else 5, pages=12 - 2 * (rank != 2)))
    with pytest.raises(
        ConsensusError, match=r"ticket 1, submitted in step 2: rank 2 \(pp 0, cp 0, tp 2\) has "
    ):
        talk.decide()


def test_the_end_point_is_fixed_when_it_is_granted(make):
    talk = make.talk()
    ticket = talk.submit(make.span(sidecars=(("mamba", "trailing_pages"),)))
    for table in talk.tables:
        table.hit(ticket, 10, ends=0b11 << 4)
    assert talk.step() == [Grant(ticket, 5)]
    for table in talk.tables:
        make.read(table, ticket, 4)
    assert talk.decide().rows[ticket] == Bounds(10, 10, 4, UNLIMITED, ends=0b11 << 4)


def test_groups_that_all_have_are_told_though_the_slowest_rank_has_no_more_pages(make):
    talk = make.talk()
    ticket = talk.submit(make.span())
    for table in talk.tables:
        table.hit(ticket, 10)
    assert talk.step() == [Grant(ticket, 10)]
    make.read(talk.tables[0], ticket, 4, 1)
    make.read(talk.tables[1], ticket, 4, 3)
    assert talk.step() == []
    talk.tables[0].progress(ticket, 8, 2)
    assert talk.decide().rows[ticket] == Bounds(10, 10, 4, UNLIMITED, 2)


def test_a_query_that_failed_leaves_no_end_point_but_none(make):
    talk = make.talk()
    ticket = talk.submit(make.span(sidecars=(("mamba", "trailing_pages"),)))
    talk.tables[0].hit(ticket, 10, ends=0b11 << 4)
    talk.tables[1].finish(ticket)
    assert talk.step() == [Settle(ticket, 0, 0, "short")]


def test_a_rank_that_said_no_end_points_can_end_at_none(make):
    """Or a record would claim ends for it that it does not have, and it would refuse the record."""
    talk = make.talk()
    ticket = talk.submit(make.span(sidecars=(("mamba", "trailing_pages"),)))
    talk.tables[0].hit(ticket, 10, ends=0b11 << 4)
    talk.tables[1].finish(ticket)
    record = talk.decide()
    assert not record.rows[ticket].ends & ~1
    for table in talk.tables:
        table.check(record)


@settings(max_examples=40)
@given(st.data())
def test_records_add_up_to_what_is_met_from_all_that_was_heard(make, data):
    """A ticket is met again only when a row has changed, which must not be seen."""
    draw = data.draw
    talk = make.talk(draw(st.integers(1, 3)))
    for number in range(draw(st.integers(1, 15))):
        if draw(st.booleans()):
            talk.submit(make.span(f"{number}"), on=draw(st.sets(st.sampled_from(talk.ranks))))
        for table in talk.tables:
            for ticket in draw(st.sets(st.integers(0, number))):
                with suppress(ConsensusError):  # of a ticket or a number that is not its turn
                    if draw(st.booleans()):
                        table.hit(ticket, draw(PAGES))
                    else:
                        table.granted(ticket, 10)  # whatever the others have said
                        if table.enter(ticket):
                            table.leave(ticket)
                        table.progress(ticket, draw(PAGES))
                        table.finish(ticket)
        heard = draw(st.sets(st.sampled_from(talk.ranks)))
        record = talk.decide(*heard) if heard else talk.meeting.decide(talk.machine, 0.0)
        for ticket, open_one in talk.machine.tickets.items():
            rows = [said.rows.get(ticket) for said in talk.meeting._heard]
            for rank, said in enumerate(talk.meeting._heard):
                if rows[rank] is None and said.facts.applied > open_one.step:
                    rows[rank] = Row(ticket, 0, hit=0, final=True, quiet=True)
            assert record.rows.get(ticket, open_one.bounds) == meet(rows)
        talk.apply(record)


# -- states ---------------------------------------------------------------------------------------


def _stray(make, window=8):
    """Rank 1's own machine, which has missed an input of step 3."""
    talk = make.talk(window=window)
    talk.hear(1)
    strays = make.talk(window=window).machine
    for number in range(2, 7):
        if number == 4:
            talk.machine.witness(1)
        record = talk.decide(0)
        talk.machine.apply(record)
        strays.apply(record)
        talk.tables[0].applied(number, talk.machine.digests(window), 1, storage_on=True)
        yield talk, strays, number


def test_the_first_step_that_differs_is_named_with_its_rank(make):
    """History 15."""
    for talk, strays, number in _stray(make):
        talk.tables[1].applied(number, strays.digests(8), 1, storage_on=True)
        talk.hear(1)
        if number == 4:
            break
        talk.meeting._compare(talk.machine)
    with pytest.raises(ConsensusError, match=r"rank 1 .* differs from the leader since step 4:"):
        talk.decide()


def test_the_first_step_is_named_also_by_a_report_that_comes_later(make):
    *_, (talk, strays, number) = _stray(make)
    talk.tables[1].applied(number, strays.digests(8), 1, storage_on=True)
    with pytest.raises(ConsensusError, match="since step 4:"):
        talk.decide()


def test_where_reports_are_too_sparse_the_steps_in_question_are_named(make):
    *_, (talk, strays, number) = _stray(make)
    talk.tables[1].applied(number, strays.digests(2), 1, storage_on=True)
    with pytest.raises(ConsensusError, match="since one of the steps 2 to 5:"):
        talk.decide()


def test_a_state_that_differs_is_told_again_by_each_decide(make):
    *_, (talk, strays, number) = _stray(make)
    talk.tables[1].applied(number, strays.digests(8), 1, storage_on=True)
    talk.hear()
    for _ in range(2):
        with pytest.raises(ConsensusError, match="since step 4:"):
            talk.meeting.decide(talk.machine, 0.0)


@pytest.mark.parametrize("applied", [2, 1 << 62])
def test_a_rank_that_is_ahead_of_the_last_record_is_named_at_once(talk, applied):
    said = replace(talk.tables[1].facts(), applied=applied, digests=(1,))
    assert talk.meeting.hear(said)
    with pytest.raises(ConsensusError, match=rf"rank 1 .* has applied record {applied}; .* is 1"):
        talk.meeting.decide(talk.machine, 0.0)


# -- operations -----------------------------------------------------------------------------------


def _issue(talk, kind, count):
    for _ in range(count):
        op = talk.machine.issue(kind)
        for table in talk.tables:
            table.issued(kind, op)


def test_backups_of_two_ranks_are_met_as_sets(talk):
    """History 8: {0, 1} and {0, 2} end 0 alone, not two of them."""
    _issue(talk, Kind.BACKUP, 3)
    for table, ops in zip(talk.tables, ((0, 1), (0, 2)), strict=True):
        for op in ops:
            table.ack(Kind.BACKUP, op)
    assert talk.decide().acks[Kind.BACKUP] == Acks((0,))


def test_an_operation_fails_for_all_when_it_fails_on_one(talk):
    """History 9."""
    _issue(talk, Kind.BACKUP, 3)
    for op in range(3):
        talk.tables[0].ack(Kind.BACKUP, op, ok=op != 0)
        talk.tables[1].ack(Kind.BACKUP, op, ok=op != 2)
    assert talk.decide().acks[Kind.BACKUP] == Acks((0, 1, 2), frozenset({0, 2}))


def test_a_failure_of_what_has_not_ended_for_all_waits_for_it(talk):
    _issue(talk, Kind.BACKUP, 1)
    talk.tables[0].ack(Kind.BACKUP, 0, ok=False)
    record = talk.decide()
    assert record.acks == (Acks(),) * len(Kind)
    talk.apply(record)
    talk.tables[1].ack(Kind.BACKUP, 0)
    assert talk.decide().acks[Kind.BACKUP] == Acks((0,), frozenset({0}))


def test_what_has_ended_is_not_ended_again_by_a_rank_that_lags(talk):
    """Rank 1 still says backup 3, as it has not applied the record that ended it."""
    _issue(talk, Kind.BACKUP, 4)
    for op in range(4):
        talk.tables[0].ack(Kind.BACKUP, op)
    talk.tables[1].ack(Kind.BACKUP, 3)
    assert [effect.op for effect in talk.step()] == [3]
    talk.tables[1].ack(Kind.BACKUP, 2)
    assert talk.decide().acks[Kind.BACKUP].ended == (2,)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.in_order])
def test_device_operations_end_up_to_the_lowest_floor(talk, kind):
    _issue(talk, kind, 5)
    for table, count in zip(talk.tables, (4, 2), strict=True):
        for op in range(count):
            table.ack(kind, op)
    assert talk.decide().acks[kind].ended == (0, 1)


def test_one_that_hangs_below_thousands_holds_up_none_of_them(make):
    """History 11; what ended for all is said once, and its acks leave the reports."""
    talk = make.talk()
    count, ended = 3000, []
    _issue(talk, Kind.BACKUP, count)
    for first in range(1, count, 100):
        for op in range(first, min(first + 100, count)):
            for table in talk.tables:
                table.ack(Kind.BACKUP, op)
        effects = talk.step()
        ended += [effect.op for effect in effects]
        for effect in effects:
            for table in talk.tables:
                table.consumed(effect.kind, effect.op)
    assert ended == list(range(1, count))
    assert talk.tables[0].facts().acked[Kind.BACKUP] == (0, frozenset())
    for table in talk.tables:
        table.ack(Kind.BACKUP, 0)
    assert [effect.op for effect in talk.step()] == [0]
    assert talk.tables[0].facts().acked[Kind.BACKUP] == (count, frozenset())


def test_an_ack_is_met_though_a_report_without_news_came_after_it(talk):
    _issue(talk, Kind.BACKUP, 1)
    for table in talk.tables:
        table.ack(Kind.BACKUP, 0)
    for rank in (0, 1, 1, 0):
        talk.hear(rank)
    assert talk.meeting.decide(talk.machine, 0.0).acks[Kind.BACKUP].ended == (0,)


def test_before_all_are_heard_nothing_ends(make):
    talk = make.talk()
    _issue(talk, Kind.BACKUP, 1)
    talk.tables[0].ack(Kind.BACKUP, 0)
    fresh = Meeting(talk.config, talk.incarnation)
    fresh.hear(talk.tables[0].facts())
    assert fresh.decide(talk.machine, 0.0).acks[Kind.BACKUP] == Acks()


# -- epochs ---------------------------------------------------------------------------------------


def test_an_epoch_begins_when_every_rank_is_ready(make):
    """History 12: the ranks that were off say when."""
    talk = make.talk(3)
    talk.tables[1].veto()
    assert talk.step() == [Storage(False, 1)]
    for _ in range(3):
        assert talk.step() == []  # ranks 0 and 2 are ready, rank 1 probes
    talk.tables[1].ready()
    assert talk.step() == [Storage(True, 2)]


def test_a_stale_veto_ends_nothing(talk):
    """History 13: it is the number of an epoch that has ended."""
    talk.tables[1].veto()
    talk.step()
    talk.tables[1].ready()
    assert talk.step() == [Storage(True, 2)]
    assert talk.tables[1].facts().veto == 1
    assert talk.step() == []


def test_a_veto_of_a_coming_epoch_costs_that_one_alone(talk):
    for table in talk.tables:
        table.veto()
    assert talk.step() == [Storage(False, 1)]
    for table in talk.tables:
        table.ready()
    talk.tables[1].veto()  # the path broke again before epoch 2 began
    assert talk.step() == [Storage(False, 2)]
    assert talk.step() == []
    talk.tables[1].ready()
    assert talk.step() == [Storage(True, 3)]


def test_an_epoch_begins_though_all_were_ready_before_the_last_one_ended(talk):
    """All of it is heard at once: what comes after the first record is no news in a report."""
    for table in talk.tables:
        table.veto()
    assert talk.step() == [Storage(False, 1)]
    for table in talk.tables:
        table.ready()  # for 2
        table.veto()
        table.ready()  # for 3
    assert talk.step() == [Storage(False, 2)]
    assert talk.step() == [Storage(True, 3)]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_an_outage_on_one_rank_costs_two_epochs_at_most(make, ranks):
    """History 12: only the rank that vetoed probes, however long it takes."""
    talk = make.talk(ranks)
    first = talk.machine.epoch
    for _ in range(20):
        talk.tables[-1].veto()  # its breaker opens at each probe
        talk.step()
    talk.tables[-1].ready()
    for _ in range(3):
        talk.step()
    assert talk.machine.storage_on
    assert talk.machine.epoch <= first + 2


def test_ranks_that_veto_at_once_end_one_epoch(make):
    talk = make.talk(4)
    for table in talk.tables:
        table.veto()
    assert talk.step() == [Storage(False, 1)]
    for table in talk.tables:
        table.ready()
    assert talk.step() == [Storage(True, 2)]


def test_ranks_that_veto_one_after_the_other_turn_storage_off_and_on_once(make):
    talk = make.talk(4)
    effects = []
    for table in talk.tables:
        table.veto()
        effects += talk.step()
    for table in talk.tables:
        table.ready()
    effects += talk.step()
    assert [effect.on for effect in effects] == [False, False, False, False, True]


def test_nobody_is_ready_before_all_are_heard(make):
    talk = make.talk()
    fresh = Meeting(talk.config, talk.incarnation)
    machine = make.driven(on=False).machine
    facts = replace(talk.tables[0].facts(), applied=0, digests=())
    fresh.hear(facts)
    assert not fresh.decide(machine, 0.0).storage_on
    fresh.hear(replace(facts, rank=1))
    assert fresh.decide(machine, 0.0).storage_on


# -- what is kept ---------------------------------------------------------------------------------


def test_tickets_that_ended_leave_nothing_behind(make):
    talk = make.talk()
    hung = talk.submit(make.span("hung"))
    for number in range(200):
        ticket = talk.submit(make.span(f"{number}", sidecars=(("m", "trailing_pages"),)))
        for table in talk.tables:
            table.hit(ticket, 10, ends=1 << 10)
        talk.step()
        for table in talk.tables:
            make.read(table, ticket, 10)
        talk.step()
        for table in talk.tables:
            table.settle(ticket)
        talk.step()
        for table in talk.tables:
            table.close(ticket)
    talk.step()
    assert list(talk.machine.tickets) == [hung]
    kept = [found for heard in talk.meeting._heard for found in (heard.rows, heard.ends)]
    assert [len(found) for found in kept] == [1, 0, 1, 0]
    assert (talk.meeting._open, talk.meeting._changed) == ({hung}, set())


def test_what_a_rank_that_lags_says_of_a_ticket_that_ended_is_forgotten(talk):
    ticket = talk.submit()
    for table in talk.tables:
        table.hit(ticket, 0)
    assert talk.step() == [Settle(ticket, 0, 0, "short")]
    talk.step()
    assert [dict(heard.rows) for heard in talk.meeting._heard] == [{}, {}]
    talk.tables[1].finish(ticket)  # it has not applied that record yet
    talk.step()
    assert [dict(heard.rows) for heard in talk.meeting._heard] == [{}, {}]


@pytest.mark.parametrize("turn", [1, 2, 3, 4])
def test_a_ticket_that_is_submitted_while_a_record_is_decided_is_in_it_or_in_the_next(make, turn):
    """The leader decides ahead, on another thread than the one that gives the inputs."""
    talk, span = make.talk(), make.span()
    for table in talk.tables:  # all say the hit before the leader has the ticket
        table.open(0, span)
        table.hit(0, 10)
    talk.hear()
    turns = iter(range(1, 99))

    class Racing(Machine):
        @property
        def next_ticket(self):
            if next(turns) == turn:
                self.submit(span)
            return self.__dict__["next_ticket"]

        @next_ticket.setter
        def next_ticket(self, number):
            self.__dict__["next_ticket"] = number

    talk.machine.__class__ = Racing
    found = [talk.meeting.decide(talk.machine, 0.0).rows for _ in range(6)]
    assert next(filter(None, found)) == {0: Bounds(10, 10, 0)}


def test_a_ticket_is_open_before_its_number_is_counted(make):
    """Or who decides meanwhile takes it for one that has ended."""
    machine, counted = make.talk().machine, []

    class Tickets(dict):
        def __setitem__(self, ticket, value):
            counted.append((ticket, machine.next_ticket))
            super().__setitem__(ticket, value)

    machine.tickets = Tickets()
    machine.submit(make.span())
    assert counted == [(0, 0)]


def _happens(chance, make, group):
    """One thing, by chance: an input on all ranks, or a fact of one."""
    table, tickets = chance.choice(group.facts), group.members[0].machine.tickets
    what = chance.randrange(12) if tickets else chance.randrange(4)
    if what == 0:
        group.each(lambda member: member.issue(Kind.BACKUP))
    elif what == 1:
        (table.veto if chance.random() < 0.05 else table.ready)()
    elif what == 2:
        with suppress(ConsensusError):  # it was never issued, or has ended here
            table.ack(Kind.BACKUP, chance.randrange(9), ok=chance.random() < 0.7)
    elif what == 3:
        rules = (("mamba", "trailing_pages"),) if chance.random() < 0.3 else ()
        group.submit(make.span(f"r{chance.random()}", sidecars=rules))
    if what < 4:
        return
    ticket = tickets[chance.choice(sorted(tickets))]
    if what == 4 and chance.random() < 0.2:
        group.each(lambda member: member.abort(ticket.span.rid))
    elif what == 5 and chance.random() < 0.2:
        table.finish(ticket.id)
    elif what < 9:
        with suppress(ConsensusError):  # it has another hit
            table.hit(ticket.id, chance.choice([8, 9]), 0x3FF if ticket.span.trailing else None)
    elif ticket.granted and table.enter(ticket.id):
        table.leave(ticket.id)
        with suppress(ConsensusError):  # it is less than before, or was final
            table.progress(ticket.id, chance.randint(1, 9))


def test_what_is_decided_in_parts_is_what_is_decided_at_once(make):
    """The leader decides ahead as often as it likes, also between the inputs of a step."""
    seen = set()
    for seed in range(20):
        chance, group = random.Random(seed), make.group(3)
        once, often = (Meeting(group.config, 7) for _ in range(2))
        machine = group.members[0].machine
        for _ in range(60):
            parts = None
            for left in reversed(range(chance.randint(1, 9))):
                _happens(chance, make, group)
                facts = chance.choice(group.facts).facts()
                assert once.hear(facts)
                assert often.hear(facts)
                if not left or chance.random() < 0.5:
                    record = often.decide(machine, 0.0)
                    parts = join(parts, record) if parts else record
            rows = {number: row for number, row in parts.rows.items() if number in machine.tickets}
            record = replace(parts, rows=rows)
            assert record == once.decide(machine, 0.0)
            data = struct.pack("<Q", 7) + encode_record(record)
            seen.update(map(type, group.each(lambda member, data=data: member.accept(data))))
    assert seen == {Storage, Grant, Settle, Release, Consume}
