"""A rank that is gone is named on every other rank, in time, and nobody hangs."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import threading
import time

import pytest

from l3store.consensus.agreement import PeerLost
from l3store.consensus.frames import Frame, pack_frame
from l3store.consensus.reports import Reports
from l3store.consensus.tcp import TcpLink
from l3store.errors import ConsensusError

PEER_TIMEOUT_S = 2.0
NOT_TAKEN = r"rank 1 \(.*\) does not take its records"
BOUND_S = PEER_TIMEOUT_S + 1.0


def told(process, rank, since):
    """The error of a survivor: of the right rank, in time, the same again, and a clean end."""
    lost = process.expect("lost")
    assert f"rank {rank} (pp 0, cp 0, tp {rank}) is lost" in lost["text"]
    assert "in step " in lost["text"]
    assert lost["at"] - since <= BOUND_S
    again = [process.expect("again") for _ in range(3)]
    assert again[0]["text"] == lost["text"]
    assert all(lost["text"].startswith(each["text"]) for each in again[1:])
    assert again[-1]["at"] - lost["at"] < 1.0  # at once, not after another wait
    assert process.ended() == 0
    assert process.errors() == ""
    return lost


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("how", "ranks"),
    [(signal.SIGKILL, 2), (signal.SIGKILL, 4), (signal.SIGSTOP, 4)],
    ids=["killed of 2", "killed of 4", "frozen of 4"],
)
def test_a_rank_is_killed_or_frozen(group, ranks, victim, how):
    processes = group.start(ranks)
    for process in processes:
        process.expect("stepped")
    since = time.monotonic()
    processes[victim].signal(how)
    for process in processes:
        if process.rank != victim:
            lost = told(process, victim, since)
            if process.rank == 0:
                assert "it is known to have applied record " in lost["text"]
            if how is signal.SIGSTOP:
                assert "it was silent for 2." in lost["text"]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_wakes_up_finds_itself_lost(group, victim):
    processes = group.start(3)
    for process in processes:
        process.expect("stepped")
    since = time.monotonic()
    processes[victim].signal(signal.SIGSTOP)
    for process in processes:
        if process.rank != victim:
            told(process, victim, since)
    since = time.monotonic()
    processes[victim].signal(signal.SIGCONT)
    told(processes[victim], victim, since)


def test_a_short_sleep_is_no_loss(group):
    processes = group.start(3, steps=400)
    for process in processes:
        process.expect("stepped")
    for victim in (0, 1):
        processes[victim].signal(signal.SIGSTOP)
        time.sleep(PEER_TIMEOUT_S * 0.6)
        processes[victim].signal(signal.SIGCONT)
    group.finished(400)


def test_whoever_waits_long_wakes_up_for_a_loss(group, config):
    (leader,) = group.start(2, {1: {"rank": None}})
    alike = config(2, heartbeat_s=0.2, policy="wait_complete")
    link = TcpLink.connect(group.address, alike, 1)
    way = Reports.join(link, alike, 10)
    try:
        leader.expect("joined")
        while link.receive():
            pass
        since = time.monotonic()
        leader.signal(signal.SIGSTOP)
        with pytest.raises(ConsensusError, match=r"rank 0 \(.*\) is lost: it was silent"):
            waits(link)
        assert time.monotonic() - since <= BOUND_S
    finally:
        way.close()


def waits(link):
    while True:
        link.wait(60.0)
        while link.receive():
            pass


def test_what_a_rank_said_last_counts_more_than_its_end(group):
    """The leader sleeps while a follower tells why it ends and goes, records first."""
    (leader,) = group.start(2, {1: {"rank": None}})
    host, port = group.address.removeprefix("tcp://").split("/")[0].split(":")
    cookie = bytes.fromhex(group.address.rsplit("/", 1)[1])
    records, reports = (socket.create_connection((host, int(port)), 5) for _ in range(2))
    with records, reports:
        for which, sock in enumerate((records, reports)):
            hello = struct.pack("<qqB", 1, 2, which) + b"a process"
            sock.sendall(pack_frame(Frame.HELLO, cookie, hello))
            assert sock.recv(100)[:4] == b"L3CT"
        leader.signal(signal.SIGSTOP)
        records.close()
        notice = struct.pack("<?q", False, 1) + b"this is why"
        reports.sendall(pack_frame(Frame.NOTICE, cookie, notice))
        reports.close()
        leader.signal(signal.SIGCONT)
        assert leader.expect("refused")["text"] == "this is why"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_leaves_has_left_and_is_not_lost(group, victim):
    processes = group.start(3, {victim: {"steps": 100}})
    for process in processes:
        if process.rank != victim:
            lost = process.expect("lost")
            assert f"rank {victim} (pp 0, cp 0, tp {victim}) has left the group" in lost["text"]
            assert process.ended() == 0
    processes[victim].expect("end")
    assert processes[victim].ended() == 0


def test_a_rank_that_leaves_at_a_record_does_not_keep_it_from_others(links, config):
    """It may have it, and be gone, before the leader has given it to the next one."""
    leader, *followers = links.group(config(3))
    rank = next(iter(leader._peers))  # whom the leader gives it first
    first, second = followers[rank - 1], followers[rank % 2]
    channel = leader._peers[rank].records
    gives = channel.send

    def gives_and_waits(data):
        waiting = gives(data)
        first.close()
        limit = time.monotonic() + 1.0
        while leader._failure is None and time.monotonic() < limit:
            time.sleep(0.01)
        second.wait(0.2)
        assert second.receive() is None  # it may look now, and must not hear of it yet
        return waiting

    channel.send = gives_and_waits
    leader.publish(b"the last one")
    del channel.send
    assert links.record(second) == b"the last one"
    with pytest.raises(ConsensusError, match=rf"rank {rank} \(.*\) has left the group"):
        links.record(second)


def test_records_from_before_the_leader_left_are_still_there(links, config):
    leader, *followers = links.group(config(3))
    records = [b"%d" % number for number in range(200)]
    for record in records:
        leader.publish(record)
    leader.close()
    for follower in followers:
        assert [links.record(follower) for _ in records] == records
        with pytest.raises(ConsensusError, match=r"rank 0 \(.*\) has left the group"):
            links.record(follower)


def test_a_rank_that_does_not_take_its_records_is_named(links, config):
    """Publishing never waits for it; when far too much waits, the group ends."""
    leader, idle, reader = links.group(config(3))
    record = bytes(1 << 20)
    published = 0

    def publish():
        nonlocal published
        while published < 100:
            leader.publish(record)
            published += 1
            assert links.record(reader) == record

    with pytest.raises(ConsensusError, match=NOT_TAKEN):
        publish()
    assert 32 <= published < 50
    for follower in (idle, reader):
        with pytest.raises(ConsensusError, match=NOT_TAKEN):
            waits(follower)


class Path:
    """What is between a follower and its leader: it can lose all that goes by one connection."""

    def __init__(self, address):
        self._port = int(address.split(":")[2].split("/")[0])
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = address.replace(f":{self._port}/", f":{self._server.getsockname()[1]}/")
        self.dead = None  # which connection, in the order of their beginning
        self._ends = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        for number in range(2):
            near = self._server.accept()[0]
            far = socket.create_connection(("127.0.0.1", self._port))
            self._ends += (near, far)
            for ends in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._carry, args=(number, *ends)))
                self._threads[-1].start()

    def _carry(self, number, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if number != self.dead:
                    sink.sendall(data)

    def close(self):
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in (self._server, *self._ends):
            end.close()


def test_a_connection_for_records_that_dies_alone_is_found(links, config):
    """All beat, by the other connection; without its records the follower would wait for ever."""
    leader = links.listen(config(2, heartbeat_s=0.1, peer_timeout_s=1.0))
    path = Path(leader.address)
    try:
        follower = links.connect(path.address, config(2, heartbeat_s=0.1, peer_timeout_s=1.0), 1)
        links.share([leader, follower], [b"a", b"b"])
        leader.publish(b"first")
        assert links.record(follower) == b"first"
        time.sleep(1.5)  # nothing is owed: an idle group has lost nothing
        assert follower.receive() is None
        path.dead = 0
        leader.publish(b"second")
        since = time.monotonic()
        text = r"rank 0 \(.*\) is lost: 4 frames were sent, and 3 have come"
        with pytest.raises(PeerLost, match=text):
            links.record(follower)
        assert time.monotonic() - since <= 2.0  # peer_timeout_s + 1 s
        with pytest.raises(PeerLost, match=text):
            leader.wait(5.0)
    finally:
        path.close()


def test_a_follower_that_slept_through_the_records_has_lost_none(links, config):
    leader, follower = links.group(config(2, heartbeat_s=0.1, peer_timeout_s=0.5))
    records = [b"%d" % number for number in range(5)]
    for record in records:
        leader.publish(record)
    time.sleep(1.0)
    assert [links.record(follower) for _ in records] == records
    assert follower.receive() is None
    leader.publish(b"on")
    assert links.record(follower) == b"on"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_go_on_says_why_though_it_still_beats(links, config, rank):
    group = links.group(config(3))
    leader = group[0]
    group[rank].fail(PeerLost(f"rank {rank} cannot go on: its disk is full", rank=rank))
    group[rank].fail(PeerLost("only the first reason counts", rank=2))
    for link in group:
        with pytest.raises(PeerLost, match=f"^rank {rank} cannot go on: its disk is full$") as told:
            leader.wait(10.0) if link is leader else waits(link)
        assert told.value.rank == rank


def test_after_its_close_a_link_says_so(links, config):
    leader, follower = links.group(config(2))
    follower.close()
    for call in (follower.receive, lambda: follower.wait(1.0), lambda: follower.share(b"", 1.0)):
        with pytest.raises(ConsensusError, match="the link of rank 1 is closed"):
            call()
    follower.report(b"from a thread that has not heard of it")
    with pytest.raises(ConsensusError, match=r"rank 1 \(.*\) has left the group"):
        leader.wait(5.0)
    for call in (leader.reports, lambda: leader.publish(b""), lambda: leader.share(b"", 1.0)):
        with pytest.raises(ConsensusError, match=r"rank 1 \(.*\) has left the group"):
            call()
