"""The machine: the same steps give the same state, and each page that is reserved comes back."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l3store.consensus.meeting import meet
from l3store.consensus.protocol import CANCELS_KEPT, Ended, Machine, Phase
from l3store.consensus.values import (
    SIDECARS,
    UNLIMITED,
    Acks,
    Bounds,
    Consume,
    Grant,
    Kind,
    Record,
    Release,
    Row,
    Settle,
    Span,
    Storage,
)
from l3store.errors import ConfigError, ConsensusError

QUIET = {"quiet": True, "final": True}
TRAILING = (("mamba", "trailing_pages"),)


@pytest.fixture
def driven(make):
    return make.driven()


# -- hits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hits", "agreed"), [((896, 0), 0), ((896, 0, 512), 0), ((896, 896), 896), ((10, 7), 7)]
)
def test_what_is_granted_is_the_least_hit(make, hits, agreed):
    """{10, 7}: kv 10 pages and indexer 7 come as one number, the run of both pools."""
    driven = make.driven(ranks=len(hits))
    driven.grant(896, *hits)
    if agreed:
        assert driven.said == [Grant(0, agreed)]
        assert driven.ledger.reserved == {0: agreed}
    else:
        assert driven.said == [Settle(0, 0, 0, "short")]
        assert not driven.ledger.reserved


def test_below_the_threshold_all_revoke_and_nothing_is_held(make):
    driven = make.driven(threshold_pages=256)
    driven.grant(400, 300, 200)
    assert driven.said == [Settle(0, 0, 0, "short")]
    assert (driven.machine.tickets, driven.machine.occupancy) == ({}, 0)
    assert (driven.ledger.reserved, driven.ledger.tree) == ({}, 0)


def test_nobody_has_answered_is_no_verdict(driven):
    """History 3: MIN = 0 is below every threshold, and nothing is known."""
    ticket = driven.machine.submit(Span("r", 0, 0, 10, b"x"))
    assert driven.say(ticket, None, None) == []
    assert driven.say(ticket, {"hit": 10}, None) == []
    assert driven.machine.tickets[ticket].phase is Phase.ASKING


def test_one_rank_below_the_threshold_is_a_verdict_before_the_others_answer(make):
    driven = make.driven(threshold_pages=4)
    ticket = driven.machine.submit(make.span())
    assert driven.say(ticket, {"hit": 3}, None) == [Settle(ticket, 0, 0, "short")]


def test_a_hit_above_the_span_grants_the_span(driven, make):
    driven.grant(10, 500, 500)
    assert driven.said == [Grant(0, 10)]


@pytest.mark.parametrize(
    ("ends", "agreed"),
    [((0b1010, 0b0110), 1), ((0b1000, 0b0100), 0), ((0b1000, 0b1000), 3), ((0b111000, 0b11000), 4)],
)
def test_end_points_are_met_as_sets(make, ends, agreed):
    """{1,3} and {1,2} give 1, {3} and {2} give 0."""
    driven = make.driven()
    ticket = driven.machine.submit(make.span(pages=5, sidecars=TRAILING))
    found = driven.say(ticket, {"hit": 5}, {"hit": 5}, ends=ends)
    assert found == ([Grant(0, agreed)] if agreed else [Settle(0, 0, 0, "short")])


def test_an_end_point_behind_the_agreed_hit_is_none(make):
    driven = make.driven()
    ticket = driven.machine.submit(make.span(sidecars=TRAILING))
    both = [(1 << 8) | (1 << 2)] * 2
    assert driven.say(ticket, {"hit": 9}, {"hit": 5}, ends=both) == [Grant(0, 2)]


@pytest.mark.parametrize(("capacity", "left"), [(9, 9), (10, 0)])
def test_allocation_is_decided_once_for_all(make, capacity, left):
    """One ledger: it cannot fit on one rank and not on the other."""
    driven = make.driven(capacity)
    driven.grant()
    assert driven.said == ([Grant(0, 10)] if not left else [Settle(0, 0, 0, "full")])
    assert (driven.ledger.free, driven.machine.occupancy) == (left, 0 if left else 10)


# -- progress and settlement ----------------------------------------------------------------------


def test_both_settle_at_the_least_progress(driven):
    ticket = driven.grant(896)
    a, b = ({"hit": 896, "done": done, "final": True} for done in (896, 300))
    assert driven.say(ticket, a, b) == [Settle(ticket, 300, 896, "complete")]
    assert (driven.ledger.tree, driven.ledger.reserved) == (300, {ticket: 596})


def test_progress_that_may_still_grow_settles_nothing(make):
    driven = make.driven(policy="wait_complete")
    ticket = driven.grant(10)
    assert driven.say(ticket, {"hit": 10, "done": 9}, {"hit": 10, "done": 10}) == []
    done = {"hit": 10, "done": 10}
    assert driven.say(ticket, done, done) == [Settle(ticket, 10, 10, "complete")]


def test_what_one_rank_ended_with_is_enough_to_know_that_waiting_brings_nothing(driven):
    ticket = driven.grant(10)
    ended, on = {"hit": 10, "done": 3, "final": True}, {"hit": 10, "done": 2}
    assert driven.say(ticket, ended, on) == []
    assert driven.say(ticket, ended, on | {"done": 3}) == [Settle(ticket, 3, 10, "complete")]


def test_pages_come_back_when_all_are_quiet_not_before(driven):
    """History 1: a rank alone brings nothing back."""
    ticket = driven.grant(10)
    full = {"hit": 10, "done": 5, "final": True}
    driven.say(ticket, full, full)
    assert driven.say(ticket, full | QUIET, full) == []
    assert driven.machine.occupancy == 5
    assert driven.say(ticket, full | QUIET, full | QUIET) == [Release(ticket, 5)]
    assert driven.ledger.free == (1 << 40) - 5
    assert (driven.machine.occupancy, driven.machine.tickets) == (0, {})


def test_a_ticket_that_settled_whole_ends_when_all_are_quiet(driven):
    ticket = driven.grant(10)
    full = {"hit": 10, "done": 10}
    driven.say(ticket, full, full)
    assert (driven.machine.occupancy, list(driven.machine.tickets)) == (0, [ticket])
    assert driven.say(ticket, full | QUIET, full | QUIET) == [Release(ticket, 0)]


def test_trailing_pools_settle_all_of_the_grant_or_nothing(make):
    for done, settled in ((4, 5), (5, 5)):
        driven = make.driven()
        ticket = driven.machine.submit(make.span(sidecars=TRAILING))
        driven.say(ticket, {"hit": 9}, {"hit": 9}, ends=[1 << 5] * 2)
        last = {"hit": 9, "done": done, "final": True}
        pages = 5 if done == settled else 0
        effects = driven.say(ticket, last, last, ends=[1 << 5] * 2)
        assert effects == [Settle(ticket, pages, 5, "complete")]


def test_groups_are_told_and_limit_nothing(make):
    driven = make.driven()
    ticket = driven.grant(10, sidecars=(("c4", "block_groups"),))
    last = {"hit": 10, "done": 10}
    effects = driven.say(ticket, last | {"groups": 2}, last | {"groups": 1})
    assert effects == [Settle(ticket, 10, 10, "complete", 1)]


# -- policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sidecars", [(), TRAILING], ids=["kv", "trailing"])
@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_want_cuts_short_under_best_effort_alone(make, policy, sidecars):
    driven = make.driven(policy=policy)
    ticket = driven.machine.submit(make.span(sidecars=sidecars))
    ends = [1 << 10] * 2 if sidecars else ()
    driven.say(ticket, {"hit": 10}, {"hit": 10}, ends=ends)
    driven.say(ticket, {"hit": 10, "done": 6}, {"hit": 10, "done": 4}, ends=ends)
    effects = driven.machine.want(ticket)
    if policy == "best_effort":
        assert effects == [Settle(ticket, 0 if sidecars else 4, 10, "wanted")]
    else:
        assert effects == []
    assert driven.machine.want(ticket) == []  # once


def test_want_before_the_hit_is_agreed_takes_nothing(driven, make):
    ticket = driven.machine.submit(make.span())
    driven.say(ticket, {"hit": 10}, None)
    assert driven.machine.want(ticket) == [Settle(ticket, 0, 0, "wanted")]
    assert driven.machine.want(ticket) == []  # it has ended, and was there


@pytest.mark.parametrize("ticket", [-1, 1])
def test_want_of_a_ticket_that_never_was_is_refused(driven, make, ticket):
    driven.machine.submit(make.span())
    with pytest.raises(ConsensusError, match=f"ticket {ticket} was never submitted; next is 1"):
        driven.machine.want(ticket)


@pytest.mark.parametrize("sidecars", [(), TRAILING], ids=["kv", "trailing"])
def test_a_timeout_is_judged_by_the_leaders_clock_for_all(make, sidecars):
    """Elapsed 1.01 and 0.99 against 1.0: no rank looks at its own clock."""
    driven = make.driven(policy="timeout", timeout_s=0.9, timeout_page_s=0.01)
    driven.record(wait=100.0)
    ticket = driven.machine.submit(make.span(sidecars=sidecars))
    ends = [1 << 10] * 2 if sidecars else ()
    driven.say(ticket, {"hit": 10}, {"hit": 10}, ends=ends)
    driven.say(ticket, {"hit": 10, "done": 6}, {"hit": 10, "done": 4}, wait=0.99, ends=ends)
    assert driven.machine.tickets[ticket].phase is Phase.READING
    assert driven.record(wait=0.02) == [Settle(ticket, 0 if sidecars else 4, 10, "timeout")]


def test_a_timeout_ends_a_query_too(make):
    driven = make.driven(policy="timeout", timeout_s=1.0)
    ticket = driven.machine.submit(make.span())
    assert driven.record(wait=1.5) == [Settle(ticket, 0, 0, "timeout")]


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete"])
def test_other_policies_have_no_clock(make, policy):
    driven = make.driven(policy=policy, timeout_s=0.0)
    driven.grant()
    assert driven.record(wait=1e6) == []


# -- tickets --------------------------------------------------------------------------------------


def test_tickets_are_numbered_densely_and_never_again(driven, make):
    first = driven.machine.submit(make.span("a"))
    driven.machine.abort("a")
    assert (first, driven.machine.submit(make.span("a"))) == (0, 1)
    assert driven.machine.submit(make.span("b", pages=1)) == 2


def test_an_attempt_that_is_submitted_twice_is_refused_and_changes_nothing(driven, make):
    driven.machine.submit(make.span())
    before = (driven.machine.occupancy, driven.machine.next_ticket, driven.machine._digest)
    with pytest.raises(ConsensusError, match=r"'r', attempt 0, was submitted twice: ticket 0"):
        driven.machine.submit(make.span(pages=4))
    assert before == (driven.machine.occupancy, driven.machine.next_ticket, driven.machine._digest)


def test_a_second_attempt_has_a_ticket_of_its_own(driven, make):
    """Progress of the first one never counts for it."""
    first = driven.grant()
    driven.say(first, {"hit": 10, "done": 8}, {"hit": 10, "done": 8})
    second = driven.machine.submit(make.span(attempt=1))
    assert driven.machine.tickets[second].bounds == Bounds()
    assert driven.machine.abort("r", 0) == [Settle(first, 0, 10, "aborted")]
    assert driven.machine.tickets[second].phase is Phase.ASKING


def test_an_abort_settles_at_nothing_and_brings_pages_back_later(driven):
    """History 14: it is a step input, and pages come back when all are quiet."""
    ticket = driven.grant()
    assert driven.machine.abort("r") == [Settle(ticket, 0, 10, "aborted")]
    assert driven.machine.abort("r") == []
    assert driven.ledger.reserved == {ticket: 10}
    assert driven.say(ticket, {"hit": 10} | QUIET, {"hit": 10} | QUIET) == [Release(ticket, 10)]


def test_a_record_made_before_an_abort_still_finds_its_ticket(driven):
    """History 14: the leader's rows of that record name pages that are still there."""
    ticket = driven.grant()
    driven.machine.abort("r")
    assert driven.say(ticket, {"hit": 10, "done": 10}, {"hit": 10, "done": 10}) == []
    assert driven.ledger.tree == 0


def test_an_abort_that_comes_first_is_remembered(driven, make):
    assert driven.machine.abort("r") == []
    assert driven.machine.submit(make.span()) is None
    assert (driven.machine.occupancy, driven.machine.tickets) == (0, {})
    assert driven.machine.submit(make.span()) == 0  # once


def test_an_abort_that_comes_first_is_used_up_though_the_submit_was_refused_anyway(driven, make):
    driven.machine.abort("r")
    driven.record(on=False)
    assert driven.machine.submit(make.span()) is None
    driven.record(epoch=2, on=True)
    assert driven.machine.submit(make.span()) == 0


def test_an_abort_of_another_attempt_is_not_this_one(driven, make):
    driven.machine.abort("r", 1)
    assert driven.machine.submit(make.span()) == 0
    assert driven.machine.submit(make.span(attempt=1)) is None


def test_aborts_that_nobody_asks_for_do_not_pile_up(driven, make):
    for number in range(CANCELS_KEPT + 1):
        driven.machine.abort(f"{number}")
    assert driven.machine.submit(make.span("0")) == 0  # the oldest is forgotten
    assert driven.machine.submit(make.span("1")) is None
    assert len(driven.machine._cancels) == CANCELS_KEPT - 1


def test_a_span_below_the_threshold_gets_no_ticket(make):
    driven = make.driven(threshold_pages=4)
    assert driven.machine.submit(make.span(pages=3)) is None
    assert driven.machine.submit(make.span(pages=4)) == 0


def test_a_span_above_the_longest_is_refused_by_name(make):
    driven = make.driven(max_pages=4)
    with pytest.raises(ConfigError, match=r"'r' asks for 5 pages; max_pages is 4"):
        driven.machine.submit(make.span(pages=5))


def test_occupancy_is_owned_by_tickets(make):
    driven = make.driven(occupancy_pages=20)
    ticket = driven.grant(12, 7, 9)
    assert driven.machine.occupancy == 7  # what was asked, then what was granted
    assert driven.machine.submit(make.span("b", pages=14)) is None
    assert driven.machine.submit(make.span("b", pages=13)) == 1
    last = {"hit": 7, "done": 7}
    driven.say(ticket, last, last)
    assert driven.machine.occupancy == 13  # what settled is the tree's


# -- epochs ---------------------------------------------------------------------------------------


def test_l3_begins_off_and_a_store_is_attached_by_an_epoch(make):
    driven = make.driven(on=False)
    assert driven.machine.submit(make.span()) is None
    assert driven.record(epoch=1, on=True) == [Storage(True, 1)]
    assert driven.machine.submit(make.span()) == 0


def test_the_end_of_an_epoch_settles_what_is_open_at_what_is_agreed(make):
    driven = make.driven(policy="wait_complete")
    reading = driven.grant()
    driven.say(reading, {"hit": 10, "done": 6}, {"hit": 10, "done": 4})
    asking = driven.machine.submit(make.span("b"))
    settled = driven.grant(rid="c")
    driven.machine.abort("c")
    assert driven.record(on=False) == [
        Storage(False, 1),
        Settle(reading, 4, 10, "off"),
        Settle(asking, 0, 0, "off"),
    ]
    assert driven.machine.submit(make.span("d")) is None
    quiet = {"hit": 10, "done": 6} | QUIET
    assert driven.say(settled, quiet, quiet) == [Release(settled, 10)]  # also while it is off


def test_a_trailing_pool_keeps_nothing_of_half_a_grant_at_the_end_of_an_epoch(make):
    driven = make.driven()
    ticket = driven.machine.submit(make.span(sidecars=TRAILING))
    driven.say(ticket, {"hit": 9}, {"hit": 9}, ends=[1 << 5] * 2)
    driven.say(ticket, {"hit": 9, "done": 4}, {"hit": 9, "done": 4}, ends=[1 << 5] * 2)
    assert driven.record(on=False)[1:] == [Settle(ticket, 0, 5, "off")]


def test_an_epoch_never_goes_back(driven):
    driven.record(epoch=3, on=False)
    with pytest.raises(ConsensusError, match="record 3 goes back from epoch 3 to 2"):
        driven.record(epoch=2, on=True)


# -- operations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Kind)
def test_operations_are_numbered_for_each_kind(driven, kind):
    """History 8: also on a rank that has nothing to do."""
    driven.machine.issue(Kind((kind + 1) % len(Kind)))
    assert [driven.machine.issue(kind) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.in_order])
def test_device_operations_end_in_order(driven, kind):
    for _ in range(3):
        driven.machine.issue(kind)
    assert driven.record(acks={kind: [0]}) == [Consume(kind, 0, True)]
    with pytest.raises(ConsensusError, match=f"ends {kind.name.lower()} 2: 3 were issued"):
        driven.record(acks={kind: [2]})


def test_backups_end_in_any_order_and_one_that_hangs_holds_up_nothing(driven):
    """History 11."""
    for _ in range(2000):
        driven.machine.issue(Kind.BACKUP)
    effects = driven.record(acks={Kind.BACKUP: range(1, 2000)}, failed=[7])
    assert [effect.op for effect in effects] == list(range(1, 2000))
    assert [effect.op for effect in effects if not effect.ok] == [7]
    assert driven.record(acks={Kind.BACKUP: [0]}) == [Consume(Kind.BACKUP, 0, True)]


@pytest.mark.parametrize("ended", [[1], [0, 0], [-1]], ids=repr)
def test_a_record_that_ends_what_was_not_issued_or_ended_before_is_refused(driven, ended):
    driven.machine.issue(Kind.BACKUP)
    with pytest.raises(ConsensusError, match=rf"record 2 ends backup {ended[-1]}: 1 were issued"):
        driven.record(acks={Kind.BACKUP: ended})


@given(st.permutations(range(9)), st.data())
def test_numbers_that_ended_are_a_set(order, data):
    ended, model = Ended(), set()
    for op in order[: data.draw(st.integers(0, 9))]:
        ended.add(op)
        model.add(op)
        assert [n in ended for n in range(10)] == [n in model for n in range(10)]
        assert ended.floor == next(n for n in range(10) if n not in model)
        for stop in range(10):
            assert ended.missing(stop) == [n for n in range(stop) if n not in model]


def test_numbers_that_end_behind_one_that_hangs_are_one_run():
    ended = Ended()
    for op in range(1, 100_000):
        ended.add(op)
    assert sys.getsizeof(ended._runs) + sum(map(sys.getsizeof, ended._runs)) < 1000
    assert ended.missing(100_000) == [0]
    ended.add(0)
    assert (ended.floor, ended._runs) == (100_000, [])


# -- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 3, -1])
def test_records_come_in_order(driven, number):
    with pytest.raises(ConsensusError, match=f"record {number} came after record 1"):
        driven.machine.apply(Record(number, 0.0, 1, True))
    assert driven.machine.number == 1


def test_a_record_that_names_a_ticket_that_is_not_open_is_refused(driven):
    with pytest.raises(ConsensusError, match="record 2 names ticket 4, which is not open here"):
        driven.say(4, {"hit": 1}, {"hit": 1})


def test_effects_come_in_one_order_whatever_the_order_of_the_rows(make):
    both = []
    for turn in (1, -1):
        driven = make.driven()
        for rid in "abc":
            driven.machine.submit(make.span(rid))
        rows = [(ticket, meet([Row(ticket, 0, hit=5)])) for ticket in range(3)]
        both.append(driven.record(dict(rows[::turn])))
    assert both == [[Grant(ticket, 5) for ticket in range(3)]] * 2


# -- digests --------------------------------------------------------------------------------------


def test_a_witness_is_a_number_of_63_bits_and_a_sign(driven):
    for value in (0, (1 << 63) - 1, -1 << 63):
        driven.machine.witness(value)
    for value in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(ConfigError, match="64 bits"):
            driven.machine.witness(value)


def test_digests_are_told_newest_first_and_kept_for_a_while(make):
    driven = make.driven(window=2)
    for _ in range(99):
        driven.record()
    newest = driven.machine.digests(3)
    assert [driven.machine.digest_after(number) for number in (100, 99, 98)] == list(newest)
    assert driven.machine.digest_after(101) is None
    assert driven.machine.digest_after(1) is None
    assert len(driven.machine.digests(1000)) == 66


STEPS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from("abc"), st.integers(0, 1), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.sampled_from("abc"), st.integers(0, 1)),
    st.tuples(st.just("want"), st.integers(0, 9)),
    st.tuples(st.just("issue"), st.sampled_from(Kind)),
    st.tuples(st.just("witness"), st.integers(-9, 9)),
    st.tuples(st.just("record")),
)


def _run(make, steps):
    """The digests after each record. A step that is refused is a step of neither."""
    driven = make.driven()
    digests, taken = [], []
    for name, *args in steps:
        machine = driven.machine
        try:
            if name == "submit":
                rid, attempt, pages = args
                machine.submit(Span(rid, attempt, 0, pages, b"x"))
            elif name == "record":
                driven.record()
                digests.append(machine.digests(1)[0])
            else:
                getattr(machine, name)(*args)
        except ConsensusError:
            continue
        taken.append((name, *args))
    return digests, taken


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=20), st.data())
def test_equal_steps_give_equal_digests_and_a_changed_one_is_seen_from_its_record_on(
    make, steps, data
):
    """History 15."""
    steps = [*steps, ("record",)]
    digests, taken = _run(make, steps)
    assert _run(make, steps)[0] == digests
    inputs = [at for at, step in enumerate(taken) if step[0] != "record"]
    if not inputs:
        return
    at = data.draw(st.sampled_from(inputs))
    changed, also_taken = _run(make, [*taken[:at], *taken[at + 1 :]])
    if also_taken != [*taken[:at], *taken[at + 1 :]]:
        return  # without it a later one is refused
    records = sum(step[0] == "record" for step in taken[:at])
    assert changed[:records] == digests[:records]
    for one, other in zip(changed[records:], digests[records:], strict=True):
        assert one != other


def test_each_other_input_gives_another_digest(make):
    """Also one that changes nothing else: the ranks' inputs are not the same."""
    inputs = [
        lambda machine: machine.submit(make.span("s")),
        lambda machine: machine.submit(make.span("s", pages=9)),
        lambda machine: machine.submit(make.span("s", attempt=1)),
        lambda machine: machine.submit(make.span("s", start=1)),
        lambda machine: machine.submit(make.span("s", tail=b"y")),
        lambda machine: machine.submit(make.span("s", sidecars=TRAILING)),
        lambda machine: machine.submit(make.span("s", pages=2)),  # below the threshold
        lambda machine: machine.abort("r"),
        lambda machine: machine.abort("s"),
        lambda machine: machine.abort("s", 1),
        lambda machine: machine.abort("s", 2),
        lambda machine: machine.want(0),
        lambda machine: machine.want(1),
        *(lambda machine, kind=kind: machine.issue(kind) for kind in Kind),
        lambda machine: machine.witness(0),
        lambda machine: machine.witness(1),
        lambda machine: machine.witness(-1),
        lambda machine: None,
    ]
    digests = []
    for input_ in inputs:
        driven = make.driven(policy="wait_complete", threshold_pages=3)
        for rid in "qr":
            driven.machine.submit(make.span(rid))
        input_(driven.machine)
        driven.record()
        digests += driven.machine.digests(1)
    assert len(set(digests)) == len(inputs)


# -- a machine under random steps -----------------------------------------------------------------


class Ranks:
    """Ranks that reach random, legal things; the machine hears of them in records."""

    def __init__(self, make, seed):
        self.rng = rng = Random(seed)
        self.policy = rng.choice(["best_effort", "timeout", "wait_complete"])
        self.driven = make.driven(
            rng.choice([5, 1000]), ranks=3, policy=self.policy, timeout_s=0.5,
            threshold_pages=rng.choice([1, 3]), occupancy_pages=60,
        )  # fmt: skip
        self.machine = self.driven.machine
        self.rows, self.ends, self.taken = {}, {}, Counter()
        self.phases, self.effects, self.ids = {}, [], []

    def submit(self):
        rng = self.rng
        sidecars = ((("s", rng.choice(SIDECARS)),)) if rng.random() < 0.5 else ()
        asked = Span(rng.choice("abcdefgh"), rng.randrange(2), 0, rng.randint(1, 12), b"", sidecars)
        if asked.label in self.machine._labels:
            return
        ticket = self.machine.submit(asked)
        if ticket is not None:
            self.ids.append(ticket)
            self.rows[ticket] = [None] * 3
            self.ends[ticket] = [1] * 3

    def reach(self):
        """One rank reaches more of one ticket."""
        rng = self.rng
        if not self.machine.tickets:
            return
        ticket = self.machine.tickets[rng.choice(list(self.machine.tickets))]
        rank, pages = rng.randrange(3), ticket.span.pages
        row = self.rows[ticket.id][rank] or Row(ticket.id, ticket.span.digest)
        if row.hit == UNLIMITED:
            row = row._replace(hit=rng.randint(0, pages))
            self.ends[ticket.id][rank] = rng.getrandbits(row.hit + 1) | 1
        elif ticket.phase is Phase.READING and not row.final:
            done = rng.randint(row.done, pages)
            row = row._replace(done=done, final=rng.random() < 0.3)
        elif ticket.phase is Phase.SETTLED:
            row = row._replace(final=True, quiet=True)
        self.rows[ticket.id][rank] = row

    def record(self):
        rng, machine = self.rng, self.machine
        rows = {
            ticket: meet(self.rows[ticket], self.ends[ticket] if open_one.span.trailing else ())
            for ticket, open_one in machine.tickets.items()
            if rng.random() < 0.7
        }
        acks = {}
        for kind in Kind:
            ops = machine.ops[kind]
            open_ops = ops.ended.missing(ops.issued)
            count = rng.randint(0, len(open_ops))
            acks[kind] = open_ops[:count] if kind.in_order else rng.sample(open_ops, count)
        on = machine.storage_on if rng.random() < 0.96 else not machine.storage_on
        epoch = machine.epoch + (on and not machine.storage_on)
        return self.driven.record(rows, acks, wait=rng.random() * 0.2, epoch=epoch, on=on)

    def step(self):
        rng, machine = self.rng, self.machine
        odds = {"submit": 4, "reach": 9, "record": 5, "abort": 1, "want": 1, "issue": 1}
        match rng.choices(list(odds), list(odds.values()))[0]:
            case "abort":
                found = machine.abort(rng.choice("abcdefgh"), rng.randrange(2))
            case "want" if machine.next_ticket:
                found = machine.want(rng.randrange(machine.next_ticket))
            case "issue":
                found = machine.issue(rng.choice(list(Kind))) and []
            case "record":
                found = self.record()
            case "reach":
                found = self.reach()
            case _:
                found = self.submit()
        self.effects += found or []

    def check(self):
        machine, ledger = self.machine, self.driven.ledger
        held = {ticket: open_one.held for ticket, open_one in machine.tickets.items()}
        assert machine.occupancy == sum(held.values())
        assert all(pages >= 0 for pages in held.values())
        assert machine.occupancy <= machine.config.occupancy_pages
        reserved = {
            ticket: held[ticket]
            for ticket, open_one in machine.tickets.items()
            if open_one.phase is not Phase.ASKING
        }
        assert reserved == ledger.reserved
        order = list(Phase)
        for ticket, open_one in machine.tickets.items():
            phase = order.index(open_one.phase)
            assert phase >= self.phases.get(ticket, 0)
            self.phases[ticket] = phase
        assert self.ids == list(range(machine.next_ticket))

    def finish(self):
        """All ranks come to rest: everything must come back."""
        for ticket in list(self.machine.tickets.values()):
            self.effects += self.machine.abort(*ticket.span.label)
        quiet = {
            ticket: meet([Row(ticket, 0, hit=0, final=True, quiet=True)] * 3)
            for ticket in self.machine.tickets
        }
        self.effects += self.driven.record(quiet)


SEEDS = 60


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_page_that_is_reserved_comes_back_once(make, seed):
    ranks = Ranks(make, seed)
    for _ in range(150):
        ranks.step()
        ranks.check()
    total = ranks.driven.ledger.free + ranks.driven.ledger.tree
    total += sum(ranks.driven.ledger.reserved.values())
    ranks.finish()
    ranks.check()
    ledger, machine = ranks.driven.ledger, ranks.machine
    assert (machine.tickets, machine.occupancy, machine._labels, ledger.reserved) == ({}, 0, {}, {})
    assert ledger.free + ledger.tree == total
    for kind in (Grant, Settle, Release):
        counts = Counter(effect.ticket for effect in ranks.effects if isinstance(effect, kind))
        assert set(counts.values()) <= {1}
    granted = {e.ticket: e.pages for e in ranks.effects if isinstance(e, Grant)}
    settled = {e.ticket: e for e in ranks.effects if isinstance(e, Settle)}
    released = {e.ticket: e.pages for e in ranks.effects if isinstance(e, Release)}
    assert settled.keys() == set(ranks.ids)
    assert released.keys() == granted.keys()
    for ticket, pages in granted.items():
        assert settled[ticket].granted == pages == settled[ticket].pages + released[ticket]


def test_the_random_steps_reach_every_reason_and_every_effect(make):
    """Or the test above tests little."""
    reasons, kinds = Counter(), Counter()
    for seed in range(SEEDS):
        ranks = Ranks(make, seed)
        for _ in range(150):
            ranks.step()
        reasons.update(e.reason for e in ranks.effects if isinstance(e, Settle))
        kinds.update(type(e).__name__ for e in ranks.effects)
    assert reasons.keys() == {"complete", "short", "full", "off", "timeout", "wanted", "aborted"}
    assert kinds.keys() == {"Grant", "Settle", "Release", "Consume", "Storage"}


def test_thousands_of_tickets_leave_nothing_behind(make):
    """One operation and one ticket hang from the first to the last."""
    machine = Machine(make.config(1, occupancy_pages=1000), make.pages())
    machine.apply(Record(1, 0.0, 1, True))
    hung = machine.submit(make.span("hung"))
    machine.issue(Kind.BACKUP)
    asked = [make.span(f"{number}", pages=1) for number in range(1000)]
    full = Bounds(1, 1, 1, 1, 0, True)
    for number in range(2, 5_000):
        ticket = machine.submit(asked[number % 1000])
        op = machine.issue(Kind.BACKUP)
        acks = (Acks(), Acks(), Acks((op,)))
        machine.apply(Record(number * 3 - 4, 0.0, 1, True, {ticket: full}, acks))
        machine.apply(Record(number * 3 - 3, 0.0, 1, True, {ticket: full}))
        machine.apply(Record(number * 3 - 2, 0.0, 1, True, {ticket: full}))
    assert list(machine.tickets) == [hung]
    sizes = [
        len(found)
        for found in (machine._labels, machine._cancels, machine.ops[Kind.BACKUP].ended._runs)
    ]
    assert sizes == [1, 0, 1]


@pytest.mark.parametrize("module", ["values", "protocol", "meeting", "wire"])
def test_what_decides_has_no_clock_no_thread_and_no_channel(module):
    """It imports what is named here: of the standard library, errors, and the values."""
    tree = ast.parse(Path(import_module(f"l3store.consensus.{module}").__file__).read_text())
    named = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    pure = {
        "__future__", "bisect", "collections", "collections.abc", "dataclasses", "enum",
        "functools", "hashlib", "itertools", "math", "operator", "struct", "typing", "zlib",
        "l3store.errors", "l3store.consensus.values", "l3store.consensus.protocol",
    }  # fmt: skip
    assert named <= pure
