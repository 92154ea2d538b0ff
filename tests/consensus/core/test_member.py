"""A rank as an engine embeds it: small groups, whole, from the submit to the last page."""

from __future__ import annotations

import re
import threading
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l3store.consensus.agreement import PeerLost
from l3store.consensus.protocol import CANCELS_KEPT
from l3store.consensus.values import Consume, Grant, Kind, Release, Settle, Storage
from l3store.errors import ConfigError, ConsensusError

# -- the small cases of the field -----------------------------------------------------------------


def hits(group, ticket, *pages):
    for table, each in zip(group.facts, pages, strict=True):
        table.hit(ticket, each)


@pytest.mark.parametrize(
    ("said", "agreed"), [((896, 0), 0), ((896, 0, 512), 0), ((896, 896), 896), ((10, 7), 7)]
)
def test_hits_that_differ_grant_the_least(make, said, agreed):
    group = make.group(len(said))
    ticket = group.submit(make.span(pages=896))
    hits(group, ticket, *said)
    (effect,) = group.step()
    assert effect == (Grant(ticket, agreed) if agreed else Settle(ticket, 0, 0, "short"))


def test_progress_that_differs_settles_the_least_on_all(make):
    group = make.group()
    ticket = group.submit(make.span(pages=896))
    hits(group, ticket, 896, 896)
    group.step()
    for table, done in zip(group.facts, (896, 300), strict=True):
        assert table.enter(ticket)
        table.progress(ticket, done)
        table.finish(ticket)
    assert group.step() == [Settle(ticket, 300, 896, "complete")]
    assert {ledger.tree for ledger in group.ledgers} == {300}


def test_below_the_threshold_nothing_is_held_and_nothing_counted(make):
    """{300, 200} with threshold 256."""
    group = make.group(capacity=1000, threshold_pages=256)
    ticket = group.submit(make.span(pages=400))
    hits(group, ticket, 300, 200)
    assert group.step() == [Settle(ticket, 0, 0, "short")]
    assert group.free() == 1000
    assert {member.machine.occupancy for member in group.members} == {0}
    assert all(not table.facts().rows for table in group.facts)


def test_it_fits_on_all_ranks_or_on_none(make):
    group = make.group(capacity=9)
    ticket = group.submit()
    hits(group, ticket, 10, 10)
    assert group.step() == [Settle(ticket, 0, 0, "full")]
    assert group.free() == 9


def test_a_timeout_is_one_verdict_by_the_leaders_clock(make):
    group = make.group(policy="timeout", timeout_s=1.0)
    ticket = group.submit()
    hits(group, ticket, 10, 10)
    group.step()
    assert group.step(0.98) == []
    assert group.step(0.02) == [Settle(ticket, 0, 10, "timeout")]


@pytest.mark.parametrize(("ends", "agreed"), [((0b1010, 0b0110), 1), ((0b1000, 0b0100), 0)])
def test_end_points_are_intersected(make, ends, agreed):
    group = make.group()
    ticket = group.submit(make.span(sidecars=(("mamba", "trailing_pages"),)))
    for table, each in zip(group.facts, ends, strict=True):
        table.hit(ticket, 5, each)
    (effect,) = group.step()
    assert effect == (Grant(ticket, agreed) if agreed else Settle(ticket, 0, 0, "short"))


def test_a_call_that_hangs_on_one_rank_keeps_its_pages_out_on_all(make):
    """Histories 1 and 6: they settle without it, and come back when it returns."""
    group = make.group(capacity=100)
    ticket = group.submit()
    hits(group, ticket, 10, 10)
    group.step()
    for table in group.facts:
        assert table.enter(ticket)
    group.facts[0].progress(ticket, 10)
    group.facts[0].leave(ticket)
    group.facts[1].progress(ticket, 5)  # page 5 hangs
    group.facts[1].finish(ticket)
    assert group.step() == [Settle(ticket, 5, 10, "complete")]
    for _ in range(5):
        assert group.step() == []
    assert group.free() == 90
    group.facts[1].leave(ticket)
    assert group.run() == [Release(ticket, 5)]
    assert group.free() == 95


def test_a_call_cannot_begin_once_its_rank_has_settled(make):
    """History 2."""
    group = make.group()
    ticket = group.submit()
    hits(group, ticket, 10, 10)
    group.step()
    assert group.each(lambda member: member.want(ticket)) == [Settle(ticket, 0, 10, "wanted")]
    assert [table.enter(ticket) for table in group.facts] == [False, False]
    assert group.run() == [Release(ticket, 10)]


def test_an_abort_between_a_report_and_its_record(make):
    """History 14: the record still names the ticket, and its pages are still there."""
    group = make.group()
    ticket = group.submit()
    hits(group, ticket, 10, 10)
    group.step()
    for table in group.facts:
        table.enter(ticket)
        table.progress(ticket, 10)
    group.now += 1
    group.ways[1].pump()
    assert group.each(lambda member: member.abort("r")) == [Settle(ticket, 0, 10, "aborted")]
    assert group.step() == []
    for table in group.facts:
        table.leave(ticket)
    assert group.run() == [Release(ticket, 10)]


def test_a_cancel_that_comes_before_its_ticket_holds_nothing(make):
    group = make.group(capacity=100)
    assert group.each(lambda member: member.abort("r")) == []
    assert group.submit() is None
    assert group.free() == 100
    assert group.members[0].machine.occupancy == 0


def test_progress_of_an_older_attempt_never_counts(make):
    group = make.group()
    first = group.submit()
    hits(group, first, 10, 10)
    group.step()
    for table in group.facts:
        assert table.enter(first)
    group.each(lambda member: member.abort("r"))
    second = group.submit(make.span(attempt=1))
    for table in group.facts:
        table.progress(first, 10)
    hits(group, second, 10, 10)
    assert Grant(second, 10) in group.step()
    assert group.members[0].machine.tickets[second].bounds.done_low == 0


def test_a_backup_that_failed_on_one_rank_is_consumed_as_failed_on_all(make):
    """Histories 8 and 9."""
    group = make.group()
    for _ in range(3):
        group.each(lambda member: member.issue(Kind.BACKUP))
    for table, order in zip(group.facts, ((0, 2), (2, 1)), strict=True):
        for op in order:
            table.ack(Kind.BACKUP, op, ok=(op, table) != (2, group.facts[1]))
    assert group.step() == [Consume(Kind.BACKUP, 2, False)]
    group.facts[1].ack(Kind.BACKUP, 0)
    assert group.step() == [Consume(Kind.BACKUP, 0, True)]
    assert group.facts[0].facts().failed[Kind.BACKUP] == frozenset()


def test_an_outage_on_one_rank_turns_storage_off_and_on_for_all(make):
    group = make.group(3, policy="wait_complete")
    ticket = group.submit()
    hits(group, ticket, 10, 10, 10)
    group.step()
    for table, done in zip(group.facts, (10, 4, 6), strict=True):
        make.read(table, ticket, done)
    group.facts[2].veto()
    assert group.step() == [Storage(False, 1), Settle(ticket, 4, 10, "off")]
    assert group.submit(make.span("b")) is None
    group.facts[2].ready()
    assert Storage(True, 2) in group.run()
    assert group.submit(make.span("b")) == 1


# -- divergence -----------------------------------------------------------------------------------


def test_a_rank_whose_inputs_differ_is_named_and_the_group_ends(make):
    """History 15."""
    group = make.group()
    group.step()
    group.members[1].witness(5)
    for member in group.members:
        member.poll()
    group.now += 1
    group.ways[1].pump()
    with pytest.raises(ConsensusError, match=r"rank 1 .* differs from the leader since step 3:"):
        group.members[0].poll()


def test_the_first_step_is_named_though_reports_are_sparse(make):
    """A follower that runs late reports several records at once; the window covers them."""
    group = make.group(window=8)
    group.step()
    leader, late = group.members
    for _ in range(6):
        assert leader.poll() is not None
    for number in range(6):
        if number == 2:
            late.witness(5)
        assert late.poll() is not None
    group.now += 1
    group.ways[1].pump()
    with pytest.raises(ConsensusError, match=r"rank 1 .* differs from the leader since step 5:"):
        leader.poll()


def test_spans_that_differ_end_the_group_with_ticket_step_and_rank(make):
    group = make.group()
    group.members[0].submit(make.span(start=5))
    group.members[1].submit(make.span(start=3, pages=12))
    with pytest.raises(
        ConsensusError, match=r"ticket 0, submitted in step 1: rank 1 .* another span"
    ):
        group.step()


# -- use ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 3, 0, -1])
def test_a_step_out_of_order_is_refused_and_nothing_has_happened(make, number):
    group = make.group()
    leader = group.members[0]
    with pytest.raises(ConsensusError, match=f"step {number} is out of order: the next one is 2"):
        leader.step(number)
    assert leader.step(2) == []
    assert leader.step() == []


USES = {
    "step": lambda member, span: member.step(),
    "poll": lambda member, span: member.poll(),
    "decide": lambda member, span: member.decide(),
    "accept": lambda member, span: member.accept(b""),
    "submit": lambda member, span: member.submit(span),
    "abort": lambda member, span: member.abort("r"),
    "want": lambda member, span: member.want(0),
    "issue": lambda member, span: member.issue(Kind.BACKUP),
    "witness": lambda member, span: member.witness(1),
}


@pytest.mark.parametrize("use", USES)
def test_a_second_thread_is_refused_and_nothing_has_happened(make, use):
    group = make.group()
    leader = group.members[0]
    before, found = leader.machine._digest, []

    def run():
        try:
            USES[use](leader, make.span())
        except ConsensusError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["two threads step one member: one thread steps, others write facts"]
    assert leader.machine._digest == before
    assert group.step() == []


@pytest.mark.parametrize("use", USES)
def test_what_ends_a_group_is_told_by_every_later_call(make, use):
    group = make.group()
    leader = group.members[0]
    group.members[1].submit(make.span(start=5))
    leader.submit(make.span())
    group.now += 1
    group.ways[1].pump()
    with pytest.raises(ConsensusError, match="another span"):
        leader.decide()
    lengths = []
    for _ in range(3):
        with pytest.raises(ConsensusError, match="another span") as caught:
            USES[use](leader, make.span("s"))
        lengths.append(len(traceback.extract_tb(caught.tb)))
    assert len(set(lengths)) == 1  # it holds no frame of the calls before


def test_a_ledger_that_breaks_ends_its_rank(make):
    """The record is half applied: to go on would be to differ from the others in silence."""
    group = make.group()
    ticket = group.submit()
    hits(group, ticket, 10, 10)
    group.ledgers[0].take = lambda ticket, pages: 1 / 0
    group.now += 1
    group.ways[1].pump()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            group.members[0].poll()


def test_a_ledger_that_aborts_the_ticket_it_takes_pages_for_is_stopped(make):
    """Its pages would be reserved for a ticket that is closed, on all ranks and for ever."""
    group = make.group()
    ticket = group.submit()
    hits(group, ticket, 10, 10)
    leader = group.members[0]
    group.ledgers[0].take = lambda ticket, pages: leader.abort("r") != []
    group.now += 1
    group.ways[1].pump()
    with pytest.raises(ConsensusError, match=r"ticket 0 was settled from inside Ledger\.take"):
        leader.poll()


def test_a_ledger_that_evicts_may_number_the_backups_of_what_goes(make):
    group = make.group()
    ticket = group.submit()
    hits(group, ticket, 10, 10)
    for member, ledger in zip(group.members, group.ledgers, strict=True):
        ledger.take = lambda ticket, pages, issue=member.issue: issue(Kind.BACKUP) == 0
    assert group.step() == [Grant(ticket, 10)]
    for table in group.facts:
        table.ack(Kind.BACKUP, 0)
    assert group.step() == [Consume(Kind.BACKUP, 0, True)]


@pytest.mark.parametrize("use", ["abort", "want"])
def test_a_ledger_that_breaks_in_an_input_ends_its_rank(make, use):
    """The machine has settled the ticket, and nobody on this rank would ever hear of it."""
    group = make.group()
    ticket = group.submit()
    hits(group, ticket, 10, 10)
    group.step()
    group.ledgers[0].settle = lambda ticket, pages: 1 / 0
    with pytest.raises(ZeroDivisionError):
        USES[use](group.members[0], make.span())
    with pytest.raises(ZeroDivisionError):
        group.members[0].poll()


def test_what_ends_one_rank_is_told_to_the_others(make):
    """They would wait for it for ever: it still gives signs of life."""
    group = make.group()
    group.members[1].witness(5)
    for member in group.members:
        member.poll()
    group.now += 1
    group.ways[1].pump()
    with pytest.raises(ConsensusError, match="differs from the leader"):
        group.members[0].poll()
    told = group.ways[0]._link.failed
    assert isinstance(told, PeerLost)
    assert told.rank == 0
    assert str(told).startswith("rank 0 (pp 0, cp 0, tp 0) cannot go on: rank 1 (pp 0, cp 0, tp 1)")
    other = make.group()
    with pytest.raises(KeyError), other.members[1]:
        raise KeyError("the engine's own")
    assert str(other.ways[1]._link.failed).endswith('cannot go on: KeyError("the engine\'s own")')
    mistaken = make.group()
    with pytest.raises(ConsensusError, match="never submitted"):
        mistaken.members[0].want(9)
    assert mistaken.ways[0]._link.failed is None


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda member, span: member.submit(span()), ConsensusError, "submitted twice"),
        (lambda member, span: member.submit(span("b", pages=5000)), ConfigError, "max_pages"),
        (lambda member, span: member.want(9), ConsensusError, "never submitted"),
        (lambda member, span: member.witness(1 << 64), ConfigError, "witness"),
    ],
)
def test_a_mistake_is_told_at_the_call_and_changes_nothing(make, mistake, error, message):
    group = make.group()
    group.submit()
    with pytest.raises(error, match=message):
        mistake(group.members[0], make.span)  # on one rank alone
    for _ in range(3):
        assert group.step() == []


def test_closing_is_leaving_and_happens_at_the_end_of_a_with(make):
    group = make.group()
    with group.members[1] as member:
        assert member is group.members[1]
        assert not group.ways[1]._link.closed
    assert group.ways[1]._link.closed


# -- what is no input ----------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "r", ("r", 0, 0, 10, b"x", ())], ids=repr)
def test_what_is_no_span_is_not_submitted(make, asked):
    group = make.group()
    before = [member.machine.digest for member in group.members]
    with pytest.raises(ConfigError, match=re.escape(f"submit of {asked!r}: it takes a Span")):
        group.members[0].submit(asked)
    assert [member.machine.digest for member in group.members] == before
    assert group.submit() == 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("backup", "'backup': it takes a Kind; did you mean 'BACKUP'? Known: BACKUP, LOAD_BACK, W"),
        ("load-back", "'load-back': it takes a Kind; did you mean 'LOAD_BACK'?"),
        (2, "2: it takes a Kind. Known: BACKUP, LOAD_BACK, WRITE_THROUGH"),
        (None, "None: it takes a Kind. Known: BACKUP, LOAD_BACK, WRITE_THROUGH"),
    ],
    ids=repr,
)
def test_what_is_no_kind_is_not_issued(make, kind, said):
    group = make.group()
    before = [member.machine.digest for member in group.members]
    with pytest.raises(ConfigError, match=re.escape(f"issue of {said}")):
        group.members[0].issue(kind)
    assert [member.machine.digest for member in group.members] == before
    assert group.each(lambda member: member.issue(Kind.BACKUP)) == 0


# -- all of it ------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.data())
def test_ranks_stay_alike_whatever_they_reach(make, data):
    """Each step checks effects and digests of all ranks; at the end every page is back."""
    draw = data.draw
    group = make.group(draw(st.integers(1, 3)), capacity=60, occupancy_pages=40)
    entered = [set() for _ in group.facts]
    open_tickets = {}
    for number in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            ticket = group.submit(make.span(f"{number}", pages=draw(st.integers(1, 20))))
            if ticket is not None:
                open_tickets[ticket] = None
        for ticket in list(open_tickets):
            row = group.members[0].machine.tickets.get(ticket)
            if row is None:
                del open_tickets[ticket]
                continue
            for table, calls in zip(group.facts, entered, strict=True):
                if not draw(st.booleans()):
                    continue
                if row.granted:
                    if ticket in calls:
                        calls.remove(ticket)
                        table.leave(ticket)
                    elif table.enter(ticket):
                        calls.add(ticket)
                        table.progress(ticket, row.granted)
                else:
                    table.finish(ticket) if draw(st.booleans()) else None
        if open_tickets and draw(st.booleans()):
            ticket = draw(st.sampled_from(sorted(open_tickets)))
            group.each(lambda member, ticket=ticket: member.want(ticket))
        group.step()
    for table, calls in zip(group.facts, entered, strict=True):
        for ticket in calls:
            table.leave(ticket)
    for number in range(12):
        group.each(lambda member, number=number: member.abort(f"{number}"))
    group.run()
    group.run()
    assert not group.members[0].machine.tickets
    assert group.free() == 60 - group.ledgers[0].tree


def test_thousands_of_requests_leave_nothing_behind(make):
    """While one ticket's call and one backup hang for ever."""
    group = make.group(capacity=100)
    hung = group.submit(make.span("hung"))
    hits(group, hung, 10, 10)
    group.step()
    group.facts[1].enter(hung)
    group.each(lambda member: member.issue(Kind.BACKUP))
    group.each(lambda member: member.abort("hung"))
    for number in range(300):
        ticket = group.submit(make.span(f"{number}"))
        op = group.each(lambda member: member.issue(Kind.BACKUP))
        hits(group, ticket, 10, 10)
        for table in group.facts:
            table.ack(Kind.BACKUP, op)
        group.step()
        group.each(lambda member, ticket=ticket: member.want(ticket))
        group.step()
        group.step()
    assert group.free() == 90
    for member, table in zip(group.members, group.facts, strict=True):
        machine = member.machine
        assert (list(machine.tickets), list(table._tickets)) == ([hung], [hung])
        assert len(machine._cancels) <= CANCELS_KEPT
        assert len(machine.ops[Kind.BACKUP].ended._runs) == 1
        assert table.facts().acked[Kind.BACKUP] == (0, frozenset())
        assert (list(table._rows), table._stale) == ([hung], set())
    meeting = group.ways[0]._meeting
    assert [list(heard.rows) for heard in meeting._heard] == [[hung], [hung]]


def test_pages_of_a_ticket_that_every_rank_has_declined_come_back(make):
    """All are quiet before it is settled: nobody will say more after it."""
    group = make.group(2, 60)
    ticket = group.submit()
    for table in group.facts:
        table.hit(ticket, 10)
    assert group.step() == [Grant(ticket, 10)]
    for table in group.facts:
        make.read(table, ticket, 7)
        table.decline(ticket)
    assert group.run() == [Settle(ticket, 7, 10, "complete", 0), Release(ticket, 3)]
    assert group.free() == 53


@pytest.mark.parametrize("what", ["decline", "finish"])
def test_a_ticket_that_a_rank_is_through_with_before_its_grant_is_settled(make, what):
    """All that will ever be known of it is known when it is granted."""
    group = make.group(2, 60, policy="wait_complete")
    ticket = group.submit()
    group.facts[1].hit(ticket, 10)
    group.step()
    getattr(group.facts[1], what)(ticket)
    group.step()
    group.facts[0].hit(ticket, 10)
    assert group.run() == [
        Grant(ticket, 10), Settle(ticket, 0, 10, "complete", 0), Release(ticket, 10)
    ]  # fmt: skip
    assert group.free() == 60
