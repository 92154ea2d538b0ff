"""What one rank has reached: a fact only grows, and what cannot be is refused at the call."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l3store.consensus.meeting import meet
from l3store.consensus.table import FactTable
from l3store.consensus.values import UNLIMITED, Acks, Bounds, Facts, Kind, Record, Row
from l3store.errors import ConsensusError

TRAILING = (("mamba", "trailing_pages"),)
MANY = 1 << 40


@pytest.fixture
def table(make):
    return opened(make)


def opened(make, **fields):
    """A table with ticket 0 of 10 pages, which is granted."""
    table = FactTable(make.config(), 1, 7)
    table.open(0, make.span(**fields))
    table.granted(0, 10)
    return table


def row(table):
    (found,) = table.facts().rows
    return found


# -- hits -----------------------------------------------------------------------------------------


def test_a_row_begins_with_its_ticket_and_nothing_else(make, table):
    assert row(table) == Row(0, make.span().digest)
    assert row(table).hit == UNLIMITED


@pytest.mark.parametrize("pages", [-1, 11, MANY])
def test_a_hit_is_a_part_of_the_span(table, pages):
    with pytest.raises(ConsensusError, match=f"ticket 0: a hit of {pages} pages; the span has 10"):
        table.hit(0, pages)


@pytest.mark.parametrize("nonsense", [1.0, float("nan"), "1", None], ids=repr)
def test_pages_are_whole_numbers(table, nonsense):
    """Or the thread that reports would die of it, later and out of sight."""
    for say in (table.hit, table.progress):
        with pytest.raises(TypeError):
            say(0, nonsense)
    with pytest.raises(TypeError):
        table.progress(0, 1, nonsense)
    with pytest.raises(TypeError):
        table.late(nonsense)
    assert row(table) == row(table)._replace(hit=UNLIMITED, done=0)


def test_a_hit_is_written_once(table):
    table.hit(0, 8)
    table.hit(0, 8)
    for other in (7, 9):
        with pytest.raises(ConsensusError, match=f"ticket 0: hit {other}, .* after hit 8"):
            table.hit(0, other)
    assert row(table).hit == 8


def test_end_points_are_written_once(make):
    table = opened(make, sidecars=TRAILING)
    table.hit(0, 8, ends=0b100)
    with pytest.raises(ConsensusError, match=r"ends 0b1000 after hit 8, ends 0b100"):
        table.hit(0, 8, ends=0b1000)


@pytest.mark.parametrize(
    ("said", "kept"), [(0b10010, 0b10010), (0, 1), (0b100001, 1), (-1, 0b11111), (1 << 99, 0)]
)
def test_end_points_are_those_up_to_the_hit(make, said, kept):
    table = FactTable(make.config(), 1, 7)
    table.open(0, make.span(sidecars=TRAILING))
    table.hit(0, 4, ends=said)
    assert table.facts().ends.get(0, 0) == kept


def test_end_points_are_said_exactly_with_a_trailing_pool(make):
    with pytest.raises(ConsensusError, match="has no pool with the rule trailing_pages"):
        opened(make).hit(0, 3, ends=0b1000)
    with pytest.raises(ConsensusError, match="has pool with the rule trailing_pages"):
        opened(make, sidecars=TRAILING).hit(0, 3)
    opened(make, sidecars=TRAILING).hit(0, 0)  # a query that failed


def test_end_points_are_not_said_again_once_one_is_chosen(make):
    table = FactTable(make.config(), 1, 7)
    table.open(0, make.span(sidecars=TRAILING))
    table.hit(0, 4, ends=0b10)
    assert table.facts().ends == {0: 0b10}
    table.granted(0, 1)
    assert table.facts().ends == {}


# -- progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reached", [(4,), (0, 1), (10, 3)])
def test_progress_without_a_call_is_refused(table, reached):
    """The ticket would be released under a read that nobody has told of."""
    with pytest.raises(ConsensusError, match=r"ticket 0: \d+ pages .* no call has entered"):
        table.progress(0, *reached)
    assert (row(table).done, row(table).groups) == (0, 0)


def test_progress_is_also_said_after_the_call_has_left(table):
    assert table.enter(0)
    table.progress(0, 4)
    table.leave(0)
    table.progress(0, 6, 1)
    assert (row(table).done, row(table).groups) == (6, 1)


def test_what_a_call_says_of_its_pages_when_quiet_was_said_is_too_late(table):
    """It has left, the settlement is applied and reported, and only then it says its progress."""
    assert table.enter(0)
    table.progress(0, 4)
    table.leave(0)
    table.settle(0)
    said = row(table)
    assert said.quiet
    table.progress(0, 9, 1)
    assert row(table) == said


def test_a_call_goes_on_under_a_settlement_and_not_when_its_rank_has_declined(table):
    assert table.enter(0)
    table.settle(0)
    table.progress(0, 4)
    assert row(table).done == 4
    table.decline(0)
    table.progress(0, 9)
    assert (row(table).done, row(table).final) == (4, True)


def test_no_pages_need_no_call(make):
    table = FactTable(make.config(), 1, 7)
    table.open(0, make.span())
    table.progress(0, 0)
    assert row(table).done == 0


def test_progress_only_grows(make, table):
    make.read(table, 0, 5, 1)
    for less in ((4, 1), (5, 0), (-1, 1)):
        with pytest.raises(ConsensusError, match=r"progress .* after 5 \(groups 1\)"):
            table.progress(0, *less)
    table.progress(0, 5, 1)
    assert (row(table).done, row(table).groups) == (5, 1)


@pytest.mark.parametrize("reached", [(11, 0), (MANY, 0), (10, UNLIMITED), (10, MANY)])
def test_progress_fits_in_the_span_and_on_the_wire(table, reached):
    with pytest.raises(ConsensusError, match=r"ticket 0: \d+ pages, \d+ groups are done; .* 10"):
        table.progress(0, *reached)


def test_what_is_final_does_not_go_on(make, table):
    make.read(table, 0, 5)
    table.finish(0)
    table.progress(0, 5)
    with pytest.raises(ConsensusError, match="which was final"):
        table.progress(0, 6)


def test_a_query_that_ended_without_an_answer_has_hit_nothing(table):
    table.finish(0)
    assert (row(table).hit, row(table).final) == (0, True)
    table.hit(0, 0)
    with pytest.raises(ConsensusError, match="after hit 0"):
        table.hit(0, 3)  # too late: others may have used it


@pytest.mark.parametrize("ticket", [-1, 1])
@pytest.mark.parametrize("say", ["hit", "progress", "finish", "enter"])
def test_a_ticket_that_never_was_is_refused(table, say, ticket):
    args = [1] * (say in ("hit", "progress"))
    with pytest.raises(ConsensusError, match=f"ticket {ticket} was never submitted; next is 1"):
        getattr(table, say)(ticket, *args)


@pytest.mark.parametrize("number", [0.0, False, "0", None], ids=repr)
def test_tickets_and_operations_are_numbered_by_ints(table, number):
    """Or the thread that reports would die of a float, later and out of sight."""
    table.issued(Kind.BACKUP, 0)
    assert table.enter(0)
    before, said = table.version, row(table)
    for say in (
        lambda: table.hit(number, 1),
        lambda: table.progress(number, 1),
        lambda: table.finish(number),
        lambda: table.enter(number),
        lambda: table.leave(number),
    ):
        with pytest.raises(ConsensusError, match=f"ticket {number!r} is no number"):
            say()
    with pytest.raises(ConsensusError, match=f"backup {number!r} is no number"):
        table.ack(Kind.BACKUP, number)
    assert (table.version, row(table)) == (before, said)
    assert table.facts().acked[Kind.BACKUP] == (0, frozenset())


def test_a_late_call_may_speak_of_a_ticket_that_has_ended(table):
    table.close(0)
    table.hit(0, 3)
    table.progress(0, 3)
    table.finish(0)
    assert table.enter(0) is False
    assert table.facts().rows == frozenset()


# -- quiet ----------------------------------------------------------------------------------------


def test_quiet_is_said_after_the_settlement_and_the_last_call(table):
    """History 2: quiet only after this rank applied the settlement and no call will start."""
    assert table.enter(0)
    assert table.enter(0)
    table.leave(0)
    table.leave(0)
    assert not row(table).quiet  # a call may still start
    assert table.enter(0)
    table.settle(0)
    assert not row(table).quiet
    assert table.enter(0) is False
    table.leave(0)
    assert row(table).quiet
    assert row(table).final


def test_no_call_enters_pages_that_are_not_there_yet(make):
    table = FactTable(make.config(), 1, 7)
    table.open(0, make.span())
    with pytest.raises(ConsensusError, match="ticket 0 has no pages: a call waits for its Grant"):
        table.enter(0)


@pytest.mark.parametrize("ticket", [0, 1, -1])
def test_no_more_calls_leave_than_entered(table, ticket):
    with pytest.raises(ConsensusError, match=f"ticket {ticket}: more calls left than entered"):
        table.leave(ticket)


def test_a_ticket_that_was_declined_before_it_was_said_has_no_row(table):
    """History 5: and a rank without a row has answered."""
    table.decline(0)
    assert table.facts().rows == frozenset()
    assert table.enter(0) is False
    table.settle(0)
    table.close(0)


def test_a_ticket_that_was_said_cannot_be_taken_back(table):
    """History 2: the leader would wait for the rest of the row for ever."""
    said = row(table)
    table.decline(0)
    assert row(table) == said._replace(hit=0, final=True, quiet=True)
    assert table.enter(0) is False
    table.hit(0, 5)
    assert row(table).hit == 0


def test_a_ticket_that_is_declined_under_a_call_is_quiet_when_the_call_has_left(table):
    table.enter(0)
    table.decline(0)
    assert not row(table).quiet
    table.leave(0)
    assert row(table).quiet
    table.decline(5)


# -- operations -----------------------------------------------------------------------------------


def acked(table, kind=Kind.BACKUP):
    return table.facts().acked[kind]


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("op", [-1, 2])
def test_an_ack_that_was_never_issued_is_refused(table, kind, op):
    table.issued(kind, 1)
    with pytest.raises(ConsensusError, match=f"{kind.name.lower()} {op} was never issued; 2 were"):
        table.ack(kind, op)


@pytest.mark.parametrize("kind", Kind)
def test_an_ack_comes_once(table, kind):
    table.issued(kind, 2)
    table.ack(kind, 0)
    with pytest.raises(ConsensusError, match=f"{kind.name.lower()} 0 was acked twice"):
        table.ack(kind, 0, ok=False)
    assert table.facts().failed[kind] == frozenset()


@pytest.mark.parametrize("order", [(1,), (0, 2)])
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.in_order])
def test_a_device_ack_out_of_order_is_refused(table, kind, order):
    table.issued(kind, 2)
    *first, last = order
    for op in first:
        table.ack(kind, op)
    with pytest.raises(ConsensusError, match=f"{last} was acked before {len(first)}; the kind is"):
        table.ack(kind, last)


def test_device_acks_are_a_floor_and_storage_acks_a_set(table):
    """History 8."""
    for kind in Kind:
        table.issued(kind, 5)
    for op in range(3):
        table.ack(Kind.LOAD_BACK, op)
    for op in (4, 0, 2):
        table.ack(Kind.BACKUP, op)
    assert acked(table, Kind.LOAD_BACK) == (3, frozenset())
    assert acked(table) == (1, {2, 4})


def test_what_ended_for_all_is_not_said_again_and_not_acked_again(table):
    table.issued(Kind.BACKUP, 5)
    for op in (2, 3, 5):
        table.ack(Kind.BACKUP, op, ok=op == 3)
    for op in (2, 3):
        table.consumed(Kind.BACKUP, op)
    assert acked(table) == (0, {5})
    assert table.facts().failed[Kind.BACKUP] == {5}
    with pytest.raises(ConsensusError, match="backup 2 was acked twice"):
        table.ack(Kind.BACKUP, 2)
    for op in (0, 1):
        table.ack(Kind.BACKUP, op)
    assert acked(table) == (4, {5})


def test_a_failure_is_said_though_the_floor_has_passed_it(table):
    """History 9: it ended above the floor, which an earlier one then moved."""
    table.issued(Kind.BACKUP, 3)
    table.ack(Kind.BACKUP, 1, ok=False)
    table.ack(Kind.BACKUP, 0)
    assert acked(table) == (2, frozenset())
    assert table.facts().failed[Kind.BACKUP] == {1}


def test_a_failure_is_said_until_it_has_ended_for_all(table):
    """History 9: also when it is below the floor."""
    table.issued(Kind.BACKUP, 1)
    table.ack(Kind.BACKUP, 0, ok=False)
    assert (acked(table), table.facts().failed[Kind.BACKUP]) == ((1, frozenset()), {0})
    table.consumed(Kind.BACKUP, 0)
    assert table.facts().failed[Kind.BACKUP] == frozenset()


@settings(max_examples=40)
@given(st.permutations(range(8)), st.data())
def test_acks_are_what_was_acked_and_has_not_ended_for_all(make, order, data):
    table = FactTable(make.config(), 1, 7)
    table.issued(Kind.BACKUP, 7)
    done, gone = set(), set()
    for op in order:
        table.ack(Kind.BACKUP, op)
        done.add(op)
        for each in data.draw(st.sets(st.sampled_from(sorted(done)))) - gone:
            table.consumed(Kind.BACKUP, each)
            gone.add(each)
        floor, above = acked(table)
        assert floor == next(n for n in range(9) if n not in done)
        assert above == {n for n in done - gone if n > floor}


def test_one_that_hangs_below_thousands_costs_no_memory(table):
    """History 11."""
    table.issued(Kind.BACKUP, 20_000)
    for op in range(1, 20_000):
        table.ack(Kind.BACKUP, op)
        table.consumed(Kind.BACKUP, op)
    acks = table._acks[Kind.BACKUP]
    assert (acks.said, acks.failed, acks.ended._runs) == (set(), set(), [[1, 20_000]])


# -- epochs ---------------------------------------------------------------------------------------


def told(table, number, epoch, *, on):
    table.applied(number, (), epoch, storage_on=on)


def spoken(table):
    facts = table.facts()
    return facts.veto, facts.ready


def test_readiness_is_the_number_of_the_next_epoch(table):
    """History 13."""
    assert spoken(table) == (0, 0)
    table.ready()
    assert spoken(table) == (0, 1)
    told(table, 1, 1, on=True)
    assert spoken(table) == (0, 1)  # it is on: nobody is ready for another one
    told(table, 2, 1, on=False)
    assert spoken(table) == (0, 2)  # another rank ended it; this one's path is good


def test_a_rank_that_vetoed_is_ready_when_it_says_so(table):
    """History 12."""
    table.ready()
    told(table, 1, 1, on=True)
    table.veto()
    assert spoken(table) == (1, 1)
    told(table, 2, 1, on=False)
    told(table, 3, 1, on=False)
    assert spoken(table) == (1, 1)
    table.ready()
    assert spoken(table) == (1, 2)


def test_a_veto_ends_the_epoch_that_this_rank_was_ready_for(table):
    table.ready()
    table.veto()
    assert spoken(table) == (1, 1)
    table.ready()
    assert spoken(table) == (1, 2)  # for the one after it


def test_too_many_late_pages_veto_the_epoch(make):
    """History 11."""
    table = FactTable(make.config(max_late_pages=10), 1, 7)
    table.ready()
    told(table, 1, 1, on=True)
    table.late(10)
    assert spoken(table) == (0, 1)
    table.late(1)
    assert spoken(table) == (1, 1)
    told(table, 2, 1, on=False)
    assert spoken(table) == (1, 1)  # still too many
    table.late(-1)
    assert spoken(table) == (1, 2)


def test_late_pages_that_come_back_veto_nothing(make):
    table = FactTable(make.config(max_late_pages=10), 1, 7)
    table.ready()
    table.late(30)
    told(table, 1, 2, on=True)
    table.late(-5)
    assert spoken(table)[0] == 1


def test_no_more_late_pages_come_back_than_were_late(table):
    table.late(3)
    with pytest.raises(ConsensusError, match="4 late pages came back of 3"):
        table.late(-4)


# -- records that claim too much ------------------------------------------------------------------


def claims(make, rows=None, **acks):
    ended = [Acks(acks.get(kind.name.lower(), ())) for kind in Kind]
    return Record(2, 0.0, 1, True, rows or {}, tuple(ended))


@pytest.mark.parametrize(
    "more",
    [{"hit_low": 9, "hit_high": 9}, {"done_low": 6}, {"groups": 2}, {"quiet": True}],
    ids=repr,
)
def test_a_record_that_claims_more_than_this_rank_has_is_refused(make, table, more):
    table.hit(0, 8)
    table.enter(0)
    table.progress(0, 5, 1)
    table.settle(0)
    has = Bounds(8, 8, 5, 5, 1)
    table.check(claims(make, {0: has}))
    with pytest.raises(ConsensusError, match=r"record 2 says of ticket 0: .* this rank has Row"):
        table.check(claims(make, {0: has._replace(**more)}))


@pytest.mark.parametrize("more", [Bounds(1, 1), Bounds(0, 9, done_low=1)], ids=repr)
def test_a_record_that_claims_anything_of_a_ticket_without_an_answer_is_refused(make, table, more):
    for ready in (table, FactTable(make.config(), 1, 7)):  # no hit yet, no row at all
        ready.check(claims(make, {0: Bounds()}))
        with pytest.raises(ConsensusError, match="record 2 says of ticket 0"):
            ready.check(claims(make, {0: more}))


def test_a_record_that_names_an_end_point_that_is_none_here_is_refused(make):
    table = opened(make, sidecars=TRAILING)
    table.hit(0, 8, ends=0b1100)
    table.check(claims(make, {0: Bounds(5, 5, ends=0b100)}))
    with pytest.raises(ConsensusError, match="record 2 says of ticket 0"):
        table.check(claims(make, {0: Bounds(5, 5, ends=0b10)}))


@pytest.mark.parametrize("kind", Kind)
def test_a_record_that_ends_what_runs_here_is_refused(make, table, kind):
    table.issued(kind, 1)
    table.ack(kind, 0)
    name = kind.name.lower()
    table.check(claims(make, **{name: (0,)}))
    with pytest.raises(ConsensusError, match=f"record 2 ends {name} 1, which has not ended on"):
        table.check(claims(make, **{name: (0, 1)}))


@given(st.integers(0, 10), st.integers(0, 10), st.booleans(), st.booleans())
def test_what_is_met_from_a_row_is_never_more_than_it(make, hit, done, final, settled):
    table = opened(make)
    table.hit(0, hit)
    make.read(table, 0, done)
    if final:
        table.finish(0)
    if settled:
        table.settle(0)
    table.check(claims(make, {0: meet([row(table), Row(0, 1, 10, 10, 0, True, True)])}))


# -- reports --------------------------------------------------------------------------------------


def test_facts_are_numbered_and_say_who_speaks(table):
    one, other = table.facts(), table.facts()
    assert (one.incarnation, one.rank) == (7, 1)
    assert other.seq == one.seq + 1
    assert Facts(7, 1, other.seq, 0, rows=other.rows) == other


SAY = st.tuples(
    st.sampled_from(
        ["open", "granted", "decline", "settle", "close", "hit", "progress", "finish", "enter",
         "leave", "facts"]
    ),
    st.integers(0, 2),
    st.integers(0, 10),
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(SAY, max_size=30))
def test_reports_say_what_is_so_whatever_was_said_before(make, said):
    """Rows are made again only where they have changed, which must not be seen."""
    table = FactTable(make.config(), 1, 7)
    for name, ticket, pages in said:
        args = {
            "open": (make.span(sidecars=TRAILING if ticket else ()),),
            "granted": (pages,),
            "hit": (pages, pages and 1 << pages) if ticket else (pages,),
            "progress": (pages,),
        }.get(name, ())
        try:
            if name == "progress":
                table.granted(ticket, 10)
                if table.enter(ticket):
                    table.leave(ticket)
            getattr(table, name)(*[ticket] * (name != "facts"), *args)
        except ConsensusError:
            continue
    rows = {number: found.row(number) for number, found in table._tickets.items()}
    facts = table.facts()
    assert facts.rows == frozenset(rows.values())
    assert facts.ends == {
        number: found.ends
        for number, found in table._tickets.items()
        if found.ends and not found.granted
    }


def test_every_change_moves_the_version_and_a_refusal_does_not(table):
    said = [
        lambda: table.hit(0, 5),
        lambda: table.enter(0),
        lambda: table.progress(0, 4),
        lambda: table.finish(0),
        lambda: table.leave(0),
        lambda: table.settle(0),
        lambda: table.late(1),
        table.veto,
        table.ready,
        lambda: told(table, 1, 1, on=True),
    ]
    for say in said:
        before = table.version
        say()
        assert table.version == before + 1
    before = table.version
    with pytest.raises(ConsensusError):
        table.late(-9)
    assert table.version == before


def test_waiting_ends_with_a_change_or_at_its_time(table):
    version = table.version
    assert table.wait(version, 0.01) == version
    assert table.wait(version - 1, 20) == version
    timer = threading.Timer(0.02, table.hit, (0, 3))
    timer.start()
    assert table.wait(version, 20) == version + 1
    timer.join()


def test_threads_that_write_at_once_lose_nothing(make):
    table = FactTable(make.config(), 1, 7)
    count, threads = 300, 4
    table.issued(Kind.BACKUP, count * threads - 1)
    for ticket in range(threads):
        table.open(ticket, make.span(pages=count))
        table.granted(ticket, count)

    def write(ticket):
        for page in range(count):
            table.enter(ticket)
            table.progress(ticket, page + 1)
            table.ack(Kind.BACKUP, page * threads + ticket)
            table.leave(ticket)

    running = [threading.Thread(target=write, args=(ticket,)) for ticket in range(threads)]
    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # or each thread is through before the next one has its turn
    try:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(often)
    assert acked(table) == (count * threads, frozenset())
    assert {found.done for found in table.facts().rows} == {count}
    assert all(not found.calls for found in table._tickets.values())
