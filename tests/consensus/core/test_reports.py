"""Reports: at most one an interval, again each heartbeat; what is no report is counted."""

from __future__ import annotations

import queue
import threading
from time import sleep

import pytest

from l3store.consensus.agreement import PeerLost
from l3store.consensus.reports import Reports
from l3store.consensus.values import Consume, Grant, Kind, Row
from l3store.consensus.wire import decode_facts, encode_facts
from l3store.errors import ConsensusError

INTERVAL, HEARTBEAT = 0.01, 0.5


class Link:
    """Of rank 1; keeps what was reported."""

    rank, ranks, dropped = 1, 2, 0

    def __init__(self):
        self.frames, self.closed = [], threading.Event()
        self.failed = queue.Queue()

    def report(self, frame):
        self.frames.append(decode_facts(frame))

    def on_report(self, call):
        self.arrived = call

    def fail(self, error):
        self.failed.put(error)

    def close(self):
        self.closed.set()


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def way(make, clock):
    config = make.config(interval_s=INTERVAL, heartbeat_s=HEARTBEAT)
    return Reports(Link(), config, 7, 100, lambda: clock[0])


def test_the_first_report_goes_out_at_once(way):
    assert way.pump() == INTERVAL
    assert len(way._link.frames) == 1


def test_at_most_one_report_goes_out_in_an_interval(way, make, clock):
    way.facts.open(0, make.span())
    way.facts.granted(0, 10)
    way.facts.enter(0)
    way.pump()
    for pages in range(1, 6):
        way.facts.progress(0, pages)
        clock[0] += INTERVAL / 10
        assert way.pump() == pytest.approx(INTERVAL - pages * INTERVAL / 10)
    assert len(way._link.frames) == 1
    clock[0] += INTERVAL
    way.pump()
    assert len(way._link.frames) == 2
    (row,) = map(Row._make, way._link.frames[1].rows)
    assert row.done == 5  # the newest, all in one


@pytest.mark.parametrize("rows", [0, 1])
def test_without_a_change_it_goes_out_again_each_heartbeat(way, make, clock, rows):
    """History 4: the last change may be in a report that was lost, also of an idle rank."""
    for ticket in range(rows):
        way.facts.open(ticket, make.span())
    way.pump()
    clock[0] += HEARTBEAT * 0.9
    assert way.pump() == pytest.approx(HEARTBEAT * 0.1)
    assert len(way._link.frames) == 1
    clock[0] += HEARTBEAT * 0.2
    way.pump()
    assert len(way._link.frames) == 2
    assert way._link.frames[1].seq > way._link.frames[0].seq


@pytest.mark.parametrize("lost", ["quiet", "ack", "ready", "applied"])
def test_nothing_hangs_by_a_report_that_was_lost(make, lost):
    """History 4, in a group: the report of each last change is lost once."""
    group = make.group(window=2)
    ticket = group.submit()
    for table in group.facts:
        table.hit(ticket, 10)
    group.step()
    for table in group.facts:
        make.read(table, ticket, 6)
        table.finish(ticket)
    group.step()
    if lost == "ack":
        for member in group.members:
            member.issue(Kind.BACKUP)
            member.facts.ack(Kind.BACKUP, 0)
    if lost == "ready":
        group.facts[1].veto()
        group.step()
        group.facts[1].ready()
    group.now += 1
    group.ways[1].pump()
    group.sent.clear()  # lost
    group.run(wait=group.config.heartbeat_s)
    machine = group.members[0].machine
    assert not machine.tickets
    assert machine.storage_on
    assert machine.ops[Kind.BACKUP].ended.floor == (lost == "ack")


def test_frames_that_are_no_facts_are_dropped_and_counted(make):
    group = make.group(3)
    leader = group.ways[0]
    facts = group.facts[1].facts()
    good = encode_facts(facts)
    wrong = [
        b"",
        good[:-1],
        good + b"\0",
        b"\x80\x04K\x01.",  # a pickle
        encode_facts(make.replace(facts, incarnation=8, seq=99)),
        encode_facts(make.replace(facts, rank=2, seq=99)),  # from the link of rank 1
        encode_facts(make.replace(facts, rank=77, seq=99)),
    ]
    before = leader.dropped
    for number, frame in enumerate(wrong, 1):
        group.sent = {1: frame}
        assert group.members[0].poll() is not None
        assert leader.dropped == before + number
    group.sent = {1: good}
    group.members[0].poll()
    assert leader.dropped == before + len(wrong)


def test_a_report_that_was_overtaken_is_dropped(make):
    """History 7."""
    group = make.group()
    older, newer = (encode_facts(group.facts[1].facts()) for _ in range(2))
    before = group.ways[0].dropped
    for frame in (newer, older, newer):
        group.sent = {1: frame}
        group.members[0].poll()
    assert group.ways[0].dropped == before + 2


def started(make, ranks=3, **fields):
    """A group whose leader decides ahead; what its link's thread does is done by hand."""
    group = make.group(ranks, **fields)
    link, leader = group.ways[0]._link, group.ways[0]
    link.on_report = lambda call: setattr(link, "arrived", call)
    group.step()
    leader._start()
    assert link.arrived()
    group.step()
    return group, link, leader._meeting


def report(group, link, rank):
    """A report of a rank that has just changed, on the thread of the leader's link."""
    group.now += 1
    group.facts[rank].wake()
    group.ways[rank].pump()
    thread = threading.Thread(target=link.arrived)
    thread.start()
    thread.join(20)


def test_reports_are_read_while_the_thread_that_steps_is_elsewhere(make):
    group, link, meeting = started(make)
    known = group.members[0].machine.number
    for rank in (1, 2):
        report(group, link, rank)
        assert meeting.reached(rank) == known
    assert group.sent == {}


def test_between_two_steps_no_more_is_read_ahead_than_a_report_of_each_rank(make):
    """With many ranks and long steps the reading would cost more than the steps."""
    group, link, meeting = started(make)
    seen = []
    for _ in range(5):
        report(group, link, 1)
        seen.append(meeting._heard[1].facts.seq)
    assert seen[0] < seen[1] == seen[2] == seen[4]
    newest = decode_facts(group.sent[1]).seq
    assert group.members[0].poll() is not None
    assert meeting._heard[1].facts.seq == newest > seen[4]
    report(group, link, 1)
    assert meeting._heard[1].facts.seq == newest + 1


def test_a_leader_that_waits_reads_by_itself(make):
    """What another thread had read would not end its wait."""
    group, link, _ = started(make, window=1)
    assert group.members[0].poll() is None
    for way in group.ways[1:]:
        way._sent_at = float("-inf")
        way.pump()
        link.arrived()
    assert sorted(group.sent) == [1, 2]
    assert group.members[0].poll() is not None


def test_a_step_gives_out_what_was_decided_ahead_and_looks_no_further(make):
    group, link, _ = started(make)
    first = group.submit()
    group.facts[0].hit(first, 10)
    for rank in (1, 2):
        group.facts[rank].hit(first, 10)
        report(group, link, rank)
    group.facts[0].hit(group.submit(make.span("next")), 10)
    link.reports = lambda: pytest.fail("the step has read reports")
    group.now += group.config.interval_s * 0.9
    assert [member.poll() for member in group.members] == [[Grant(first, 10)]] * 3
    assert group.members[0].poll() == []
    assert group.members[0].machine.now == group.now  # the clock is the step's


def test_a_step_looks_by_itself_where_that_was_an_interval_ago(make):
    """And what was decided before is not lost by it."""
    group, link, _ = started(make)
    tickets = [group.submit(make.span(f"{n}")) for n in range(2)]
    op = group.each(lambda member: member.issue(Kind.BACKUP))
    for table in group.facts:
        table.hit(tickets[0], 10)
        table.ack(Kind.BACKUP, op)
    for rank in (1, 2):
        report(group, link, rank)
    for table in group.facts:
        table.hit(tickets[1], 9)
    for rank in (1, 2):
        group.ways[rank]._sent_at = float("-inf")
        group.ways[rank].pump()
    group.now += group.config.interval_s * 1.1
    effects = [Consume(Kind.BACKUP, op, True), Grant(tickets[0], 10), Grant(tickets[1], 9)]
    assert [member.poll() for member in group.members] == [effects] * 3


def test_a_fact_of_the_leader_is_at_most_an_interval_late(make):
    group, link, _ = started(make)
    ticket = group.submit()
    for rank in (1, 2):
        group.facts[rank].hit(ticket, 10)
        report(group, link, rank)
    group.facts[0].hit(ticket, 10)
    assert group.members[0].poll() == []
    group.now += group.config.interval_s * 1.1
    assert group.members[0].poll() == [Grant(ticket, 10)]


def test_what_was_decided_ahead_of_a_ticket_that_an_input_ends_is_left_out(make):
    """History 14, on the leader: the record would name what no rank has any more."""
    group, link, _ = started(make)
    ticket = group.submit()
    group.facts[0].hit(ticket, 10)
    for rank in (1, 2):
        group.facts[rank].hit(ticket, 10)
        report(group, link, rank)
    assert group.ways[0]._news.rows.keys() == {ticket}
    group.each(lambda member: member.abort("r"))
    assert [member.poll() for member in group.members] == [[]] * 3
    assert group.run() == []


@pytest.mark.parametrize("where", ["while it decides", "before it is applied", "half applied"])
def test_nothing_is_decided_ahead_while_a_record_is_made_or_applied(make, where):
    """The machine changes in between."""
    group, link, meeting = started(make)
    leader, machine = group.ways[0], group.members[0].machine
    whose, name = {
        "while it decides": (meeting, "decide"),
        "before it is applied": (link, "publish"),
        "half applied": (machine, "_mix"),
    }[where]
    call, found = getattr(whose, name), []

    def watched(*args):
        found.append(leader.decide_ahead())
        return call(*args)

    setattr(whose, name, watched)
    group.now += 1
    assert group.members[0].poll() == []
    assert found == [False]
    assert leader.decide_ahead()  # and behind it is


def test_what_is_wrong_with_a_report_that_was_read_ahead_ends_the_next_step(make):
    group, link, _ = started(make)
    ticket = group.submit()
    for table in group.facts:
        table.hit(ticket, 7)
    group.step()
    group.facts[1]._tickets[ticket].hit = 9
    group.facts[1]._stale.add(ticket)
    report(group, link, 1)
    with pytest.raises(ConsensusError, match=r"^rank 1 .* took back what it said of ticket 0: "):
        group.members[0].poll()
    assert "took back" in str(link.failed)  # the others are told


def test_the_first_thing_that_is_wrong_is_the_one_that_a_step_raises(make):
    """A rank that ends of it is lost before a leader with long steps has said why."""
    group, link, _ = started(make, ranks=4)
    group.facts[1]._veto = 2
    report(group, link, 1)
    group.facts[1]._veto = 1
    report(group, link, 1)

    def lost():
        raise PeerLost("rank 2 is lost", rank=2)

    link.reports = lost
    assert not link.arrived()
    with pytest.raises(ConsensusError, match="took back what it said"):
        group.members[0].poll()


def test_the_thread_of_the_link_does_not_wait_for_a_step(make):
    group, link, _ = started(make)
    found = []

    def reports():
        thread = threading.Thread(target=lambda: found.append(link.arrived()))
        thread.start()
        thread.join(20)
        return {}

    link.reports = reports
    group.now += 1
    assert group.members[0].poll() is not None
    assert found == [False]


def test_a_step_waits_until_what_is_read_ahead_was_heard(make):
    group, link, _ = started(make)
    reading, go = threading.Event(), threading.Event()

    def reports():
        link.reports = dict
        reading.set()
        go.wait(20)
        return {}

    link.reports = reports
    ahead = threading.Thread(target=link.arrived)
    ahead.start()
    assert reading.wait(20)
    step = threading.Thread(target=lambda: group.ways[0].poll(group.members[0].machine))
    step.start()
    step.join(0.1)
    assert step.is_alive()
    go.set()
    for thread in (ahead, step):
        thread.join(20)
        assert not thread.is_alive()


def test_the_leader_sends_itself_nothing(make):
    link = Link()
    link.rank = 0
    way = Reports(link, make.config(), 7, 100)
    way._start()
    assert not [each for each in threading.enumerate() if each.name == "l3store-reports"]


def test_a_follower_reports_by_itself_until_it_is_closed(make):
    way = Reports(Link(), make.config(heartbeat_s=0.02), 7, 100)
    way._start()
    way.facts.open(0, make.span())
    way.facts.hit(0, 5)
    for _ in range(2000):
        if len(way._link.frames) > 3 and way._link.frames[-1].rows:
            break
        sleep(0.01)
    (row,) = map(Row._make, way._link.frames[-1].rows)
    assert row.hit == 5
    way.close()
    way.close()
    assert way._link.closed.is_set()
    assert not [each for each in threading.enumerate() if each.name == "l3store-reports"]


def test_a_rank_whose_reports_have_ended_is_lost_not_silent(make, monkeypatch):
    """It would beat and say nothing, and the leader wait for it for ever."""
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    way = Reports(Link(), make.config(), 7, 100)
    way._link.report = lambda frame: 1 / 0
    way._start()
    told = way._link.failed.get(timeout=20)
    assert str(told) == (
        "rank 1 (pp 0, cp 0, tp 1) cannot go on: its reports have stopped: "
        "ZeroDivisionError('division by zero')"
    )
    way.close()
    assert [type(error) for error in seen] == [ZeroDivisionError]
