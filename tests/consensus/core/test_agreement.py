"""Joining: what must be equal is, or every rank is told what is not; and the way of a record."""

from __future__ import annotations

import json
import struct
import threading
from itertools import count

import pytest

from l3store.consensus.agreement import PeerLost, compare
from l3store.consensus.collective import Collective
from l3store.consensus.reports import Reports
from l3store.consensus.values import Acks, Bounds, Consume, Grant, Kind, Record, Topology
from l3store.consensus.wire import decode_record, encode_record
from l3store.errors import ConfigError, ConsensusError


class Meeting:
    """Where links of one process meet: blobs pass, reports and records go nowhere."""

    def __init__(self, ranks):
        self.blobs = [b""] * ranks
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.links = [Link(self, rank) for rank in range(ranks)]


class Link:
    dropped = 0

    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.ranks = meeting, rank, len(meeting.blobs)
        self.closed = 0
        self.lost = None
        self.waits = 0

    def share(self, blob, timeout_s):
        self.meeting.blobs[self.rank] = blob
        self.meeting.barrier.wait()
        return list(self.meeting.blobs)

    def report(self, frame):
        pass

    def reports(self):
        return {}

    def on_report(self, call):
        pass

    def publish(self, frame):
        pass

    def receive(self):
        return None

    def wait(self, timeout_s):
        self.waits += 1
        if self.lost:
            raise self.lost

    def close(self):
        self.closed += 1


class Losing(Link):
    """A link that has found a rank lost."""

    def receive(self):
        raise self.lost

    def reports(self):
        raise self.lost


def join(configs, capacities=None, way=Reports):
    """What each rank got: an agreement, or its error; and its link."""
    meeting = Meeting(len(configs))
    found = [None] * len(configs)

    def run(rank):
        capacity = capacities[rank] if capacities else 100
        try:
            found[rank] = way.join(meeting.links[rank], configs[rank], capacity, 20.0)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(configs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, Reports):
            each.close()
    return found, meeting.links


# -- joining --------------------------------------------------------------------------------------


def test_capacity_is_the_least_of_all_ranks(make):
    """100e9 bytes at 12,464 and 13,120 bytes a token, pages of 64: 7,621,888 tokens on both."""
    pages = [int(100e9) // size // 64 for size in (12_464, 13_120)]
    joined, _ = join([make.config()] * 2, pages)
    assert [each.capacity_pages * 64 for each in joined] == [7_621_888] * 2


def test_the_incarnation_is_the_leaders_and_new_for_each_group(make):
    said = []
    for _ in range(2):
        joined, _ = join([make.config()] * 2)
        assert len({each.facts.facts().incarnation for each in joined}) == 1
        said.append(joined[0].facts.facts().incarnation)
    assert said[0] != said[1]


OTHERS = {
    "schema": "2", "policy": "timeout", "threshold_pages": 2, "occupancy_pages": 9,
    "max_pages": 8, "max_late_pages": 7, "batch_pages": 6, "deadline_s": 5.0, "timeout_s": 4.0,
    "timeout_page_s": 3.0, "window": 2, "interval_s": 0.1, "heartbeat_s": 0.5,
    "peer_timeout_s": 99.0,
}  # fmt: skip


def test_every_field_has_another_value_here(make):
    assert OTHERS.keys() | {"ranks", "pp", "cp", "tp"} == make.config().plain().keys()


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_differs_is_named_with_both_values_on_every_rank(make, name):
    configs = [make.config(3), make.config(3), make.config(3, **{name: OTHERS[name]})]
    found, links = join(configs)
    ours, theirs = getattr(configs[0], name), OTHERS[name]
    for error in found:
        assert isinstance(error, ConfigError)
        assert f"{name} differs: {ours!r} on rank 0 (pp 0, cp 0, tp 0)" in str(error)
        assert f"{theirs!r} on rank 2" in str(error)
    assert [link.closed for link in links] == [1, 1, 1]


def test_topologies_that_differ_are_named_by_their_sizes(make):
    configs = [make.replace(make.config(4), topology=Topology(4, **sizes)) for sizes in (
        {"tp": 4}, {"tp": 4}, {"tp": 4}, {"pp": 2, "tp": 2})]  # fmt: skip
    for error in join(configs)[0]:
        assert isinstance(error, ConfigError)
        assert "pp differs: 1 on rank 0" in str(error)


def test_ranks_of_two_protocols_are_told_so(make):
    class Other(Reports):
        pass

    meeting_of = count()
    ways = [Reports, Other]

    class Way:
        @staticmethod
        def join(*args):
            return ways[next(meeting_of)].join(*args)

    for error in join([make.config()] * 2, way=Way)[0]:
        assert isinstance(error, ConfigError)
        assert "protocol differs" in str(error)


def test_a_version_that_only_one_rank_has_is_a_difference(make):
    plain = make.config().plain()
    with pytest.raises(ConfigError, match=r"new differs: None on rank 0 .*, 1 on rank 1"):
        compare([plain, plain | {"new": 1}], make.config())
    with pytest.raises(ConfigError, match=r"new differs: 1 on rank 0 .*, None on rank 1"):
        compare([plain | {"new": 1}, plain], make.config())


def test_capacity_and_incarnation_may_differ(make):
    hellos = [make.config().plain() | {"capacity_pages": n, "incarnation": n} for n in (1, 2)]
    assert compare(hellos, make.config()) is None


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_rank_without_host_pages_is_named_on_every_rank(make, capacity):
    found, links = join([make.config()] * 2, [100, capacity])
    for error in found:
        assert isinstance(error, ConfigError)
        assert f"capacity_pages={capacity}: rank 1 (pp 0, cp 0, tp 1) has no host" in str(error)
    assert [link.closed for link in links] == [1, 1]


@pytest.mark.parametrize("capacity", [True, 1.0, float("nan"), "100", None], ids=repr)
def test_a_capacity_is_a_number_of_pages_or_every_rank_is_told(make, capacity):
    found, links = join([make.config()] * 2, [100, capacity])
    for error in found:
        assert isinstance(error, ConfigError)
        told = f"capacity_pages={capacity!r} of rank 1 (pp 0, cp 0, tp 1) is not a number of pages"
        assert str(error) == told
    assert [link.closed for link in links] == [1, 1]


def test_a_link_of_another_size_is_refused_and_closed(make):
    link = Meeting(3).links[0]
    with pytest.raises(ConfigError, match=r"the link has 3 ranks and the topology 2 \(pp 1 x "):
        Reports.join(link, make.config(), 100)
    assert link.closed == 1


def test_a_link_for_another_way_is_refused_and_closed(make):
    link = Meeting(2).links[0]
    with pytest.raises(ConfigError, match=r"^Collective needs a link with `gather`, and Link has"):
        Collective.join(link, make.config(), 100)
    assert link.closed == 1


@pytest.mark.parametrize("blob", [b"", b"\xff", b"[]", b"{}", b'{"capacity_pages": "5"}'])
def test_a_hello_that_is_none_is_named_with_its_rank(make, blob):
    link = Meeting(2).links[0]
    link.share = lambda own, timeout_s: [own, blob]
    with pytest.raises(ConsensusError, match=r"rank 1 \(pp 0, cp 0, tp 1\) said no hello"):
        Reports.join(link, make.config(), 100)
    assert link.closed == 1


def test_a_rank_that_does_not_come_closes_the_link(make):
    link = Meeting(2).links[0]
    link.share = lambda own, timeout_s: (_ for _ in ()).throw(PeerLost("rank 1", rank=1))
    with pytest.raises(PeerLost):
        Reports.join(link, make.config(), 100)
    assert link.closed == 1


def test_a_hello_holds_no_secret_but_the_incarnation(make):
    meeting = Meeting(1)
    Reports.join(meeting.links[0], make.config(1), 100).close()
    hello = json.loads(meeting.blobs[0])
    assert hello.keys() == make.config(1).plain().keys() | {
        "protocol", "wire", "capacity_pages", "incarnation",
    }  # fmt: skip


def test_blobs_are_shared_by_rank(make):
    """Samples of the leader reach all ranks."""
    ways = [Reports(link, make.config(), 7, 100) for link in Meeting(2).links]
    found = []
    thread = threading.Thread(target=lambda: found.append(ways[1].share(b"one", 20.0)))
    thread.start()
    found.append(ways[0].share(b"zero", 20.0))
    thread.join()
    assert found == [[b"zero", b"one"]] * 2


# -- records --------------------------------------------------------------------------------------


def test_the_leader_is_at_most_window_records_ahead(make):
    """And waits only then; a rank that is known to have followed lets it go on."""
    group = make.group(3, window=4)
    leader = group.members[0]
    made = group.members[0].machine.number
    while leader.poll() is not None:
        pass
    assert leader.machine.number == made + 3  # rank 1 and 2 are known to have applied none
    for member, way in zip(group.members[1:], group.ways[1:], strict=True):
        while member.poll() is not None:
            pass
        group.now += 1
        way.pump()
    assert leader.poll() is not None


def carried(record):
    """As `decide` of the groups here gives it away."""
    return struct.pack("<Q", 7) + record


def test_a_record_is_carried_by_the_engine(make):
    group = make.group()
    ticket = group.submit()
    for table in group.facts:
        table.hit(ticket, 10)
    group.now += 1
    group.ways[1].pump()
    data = group.members[0].decide()
    assert decode_record(data[8:]).rows[ticket].hit_low == 10  # behind the incarnation
    said = [member.accept(data) for member in group.members]
    assert said[0] == said[1] != []
    assert all(not queue for queue in group.records)  # agreement has cost no message


@pytest.mark.parametrize("again", ["decide", "step", "poll"])
def test_what_was_decided_and_not_accepted_is_not_lost(make, again):
    """The news of the first one is in no later record: a broadcast that failed is made again."""
    group = make.group()
    ticket = group.submit()
    op = group.each(lambda member: member.issue(Kind.BACKUP))
    for table in group.facts:
        table.hit(ticket, 10)
        table.ack(Kind.BACKUP, op)
    group.now += 1
    group.ways[1].pump()
    leader, other = group.members
    data = leader.decide()
    if again == "decide":
        assert leader.decide() == data
        said = [leader.accept(data), other.accept(data)]
    else:
        said = [getattr(leader, again)(), other.step()]
    assert said == [[Consume(Kind.BACKUP, op, True), Grant(ticket, 10)]] * 2
    assert group.step() == []


def test_a_record_of_another_group_is_refused(make):
    """It may have the right number and claim nothing: only its group tells."""
    ours, theirs = make.group(), make.group()
    for way in theirs.ways:
        way._incarnation = 8
    with pytest.raises(ConsensusError, match="a record is of another group"):
        ours.members[1].accept(theirs.members[0].decide())


def test_only_the_leader_decides(make):
    group = make.group()
    with pytest.raises(ConsensusError, match="rank 1 does not lead: rank 0 decides"):
        group.members[1].decide()
    assert group.step() == []  # and nothing has ended by it


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"L3CS" + bytes(40)])
def test_bytes_that_are_no_record_are_refused(make, data):
    with pytest.raises(ConsensusError, match="a record cannot be read: "):
        make.group().ways[1].accept(data and carried(data))


def test_a_record_that_claims_more_than_a_rank_has_is_refused(make):
    group = make.group()
    ticket = group.submit()
    group.facts[1].hit(ticket, 4)
    claim = Record(2, 0.0, 1, True, {ticket: Bounds(5, 5)})
    with pytest.raises(ConsensusError, match="record 2 says of ticket 0"):
        group.members[1].accept(carried(encode_record(claim)))
    group.members[0].issue(Kind.BACKUP)
    ends = Record(2, 0.0, 1, True, {}, (Acks(), Acks(), Acks((0,))))
    with pytest.raises(ConsensusError, match="record 2 ends backup 0, which has not ended"):
        group.members[0].accept(carried(encode_record(ends)))


@pytest.mark.parametrize("way_of", ["step", "poll"])
def test_a_lost_leader_is_told_with_the_step_and_the_open_tickets(make, way_of):
    group = make.group()
    for number in range(10):
        group.submit(make.span(f"{number}"))
    way = group.ways[1]
    way._link = Losing(Meeting(2), 1)
    way._link.lost = PeerLost("rank 0 is gone", rank=0)
    text = r"^rank 0 is gone; in step 2; tickets open: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more$"
    with pytest.raises(PeerLost, match=text) as caught:
        getattr(way, way_of)(group.members[1].machine)
    assert caught.value.rank == 0


@pytest.mark.parametrize("way_of", ["step", "poll", "decide"])
def test_a_lost_follower_is_told_with_how_far_it_was(make, way_of):
    group = make.group()
    group.step()
    group.step()
    way = group.ways[0]
    way._link = Losing(Meeting(2), 0)
    way._link.lost = PeerLost("rank 1 is gone", rank=1)
    text = "^rank 1 is gone; in step 4, and it is known to have applied record 2$"
    with pytest.raises(PeerLost, match=text) as caught:
        getattr(way, way_of)(group.members[0].machine)
    assert caught.value.rank == 1


def test_step_waits_for_its_record(make):
    group = make.group()
    way, machine = group.ways[1], group.members[1].machine
    record = Record(2, 0.0, 1, True)

    class Late(Link):
        def receive(self):
            return encode_record(record) if self.waits == 3 else None

    way._link = Late(Meeting(2), 1)
    assert way.step(machine) == record


def test_a_step_that_waits_long_says_for_whom(make, caplog):
    """No error, and no end: whoever looks after the engine is told where to look."""
    group = make.group(window=2, peer_timeout_s=30.0)
    group.step()
    leader, late = group.ways
    assert group.members[0].poll() is not None
    assert group.members[0].poll() is None

    def waits(way):
        turns = count()

        def wait(timeout_s):
            group.now += 11
            if next(turns) == 6:
                raise PeerLost("enough", rank=None)

        way._link.wait = wait
        caplog.clear()
        with pytest.raises(PeerLost, match="enough"):
            way.step(group.members[way.rank].machine)
        return [(each.levelname, each.getMessage()) for each in caplog.records]

    alive = "no rank is lost, and one stands still"
    whom = "rank 1 (pp 0, cp 0, tp 1), which has applied record 1"
    assert waits(leader) == [
        ("WARNING", f"step 4 of rank 0 (pp 0, cp 0, tp 0) has waited {s} s for {whom}; {alive}")
        for s in (33, 66)
    ]
    group.records[1].clear()
    whom = "record 3 of rank 0 (pp 0, cp 0, tp 0)"
    assert waits(late) == [
        ("WARNING", f"step 3 of rank 1 (pp 0, cp 0, tp 1) has waited {s} s for {whom}; {alive}")
        for s in (33, 66)
    ]
