"""What does not fit together is refused on every rank, by name; strangers change nothing."""

from __future__ import annotations

import re
import socket
import struct
import time
from contextlib import contextmanager

import pytest

from l3store.consensus.frames import Frame, pack_frame
from l3store.consensus.tcp import TcpLink
from l3store.errors import ConfigError, ConsensusError

WHO = r"process \d+ on \S+"


def refusals(processes, kind):
    texts = []
    for process in processes:
        refused = process.expect("refused")
        assert refused["kind"] == kind
        assert process.ended() == 0
        texts.append(refused["text"])
    return texts


def test_two_processes_claim_one_rank(group):
    processes = group.start(3, {2: {"rank": 1}})
    texts = refusals(processes, "ConfigError")
    assert len(set(texts)) == 1
    assert re.fullmatch(rf"two processes claim rank 1 \(pp 0, .*\): {WHO} and {WHO}", texts[0])
    first, second = re.findall(r"process \d+", texts[0])
    assert first != second


@pytest.mark.parametrize("rank", [0, 3, -1])
def test_a_rank_that_the_group_does_not_have(group, rank):
    processes = group.start(3, {1: {"rank": rank}})
    texts = refusals(processes, "ConfigError")
    assert len(set(texts)) == 1
    if rank == 0:
        assert re.fullmatch(rf"two processes claim rank 0 \(pp 0, .*\): {WHO} and {WHO}", texts[0])
    else:
        text = rf"rank {rank} \({WHO}\) is not in a group of 3: 0 to 2; rank 0 is {WHO}"
        assert re.fullmatch(text, texts[0])


def test_ranks_count_the_group_differently(group):
    processes = group.start(3, {1: {"ranks": 2}})
    texts = refusals(processes, "ConfigError")
    assert len(set(texts)) == 1
    text = rf"ranks differ: 3 on rank 0 \(pp .*\) \({WHO}\), 2 on rank 1 \({WHO}\); .*"
    assert re.fullmatch(text, texts[0])


def test_a_rank_that_comes_late_hears_why_there_is_no_group(group):
    late = {"rank": 2, "timeout_s": 20.0}
    processes = group.start(3, {1: {"ranks": 2}, 2: {"rank": None}})
    assert processes[1].expect("refused")
    processes += [group_process(group, 3, late)]
    assert len(set(refusals([processes[0], processes[-1]], "ConfigError"))) == 1


def group_process(group, ranks, own):
    """One more process of a group that was started."""
    process_of = type(group.processes[0])
    plan = {
        "config": {}, "steps": 10, "sleep_at": -1, "sleep_s": 0.0, "work_s": 0.0, "ranks": ranks,
        "address": group.address, **own,
    }  # fmt: skip
    group.processes.append(process_of(plan))
    return group.processes[-1]


def test_one_process_too_many_leaves_a_complete_group_alone(group):
    processes = list(group.start(2, steps=400))
    for process in processes:
        process.expect("joined")
    extra = group_process(group, 2, {"rank": 1, "timeout_s": 5.0})
    (text,) = refusals([extra], "ConfigError")
    assert re.match(r"two processes claim rank 1 ", text)
    group.processes.remove(extra)
    extra.end()
    group.finished(400)


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [("window", 8, 4), ("policy", "wait_complete", "timeout"), ("threshold_pages", 1, 7)],
)
def test_unequal_configuration(group, field, ours, theirs):
    processes = group.start(3, {2: {"config": {field: theirs}}})
    texts = refusals(processes, "ConfigError")
    text = (
        f"{field} differs: {ours!r} on rank 0 (pp 0, cp 0, tp 0), {theirs!r} on rank 2 (pp 0, cp "
        f"0, tp 2); it must be equal on all ranks"
    )
    assert set(texts) == {text}


def test_a_rank_that_never_comes(group):
    processes = group.start(4, {2: {"rank": None}}, timeout_s=2.0)
    texts = refusals(processes, "PeerLost")
    assert set(texts) == {"rank 2 (pp 0, cp 0, tp 2) did not come within 2 s"}


def test_a_leader_that_does_not_come_to_share(links, config):
    leader = links.listen(config(2))
    follower = links.connect(leader.address, config(2), 1)
    text = r"rank 0 \(.*\) has not brought the ranks together in 0.1 s"
    with pytest.raises(ConsensusError, match=text):
        follower.share(b"", 0.1)
    with pytest.raises(ConsensusError, match=text):
        leader.wait(10.0)


def test_a_rank_that_is_lost_before_all_have_met(group):
    processes = list(group.start(3, {2: {"rank": None}}))
    processes[1].expect("connected")
    processes[1].signal(9)
    (text,) = refusals(processes[:1], "PeerLost")
    assert text.startswith("rank 1 (pp 0, cp 0, tp 1) is lost")


def test_no_leader_at_the_address(config):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = rf"rank 0 \(.*\) cannot be reached at 127.0.0.1, port {port}, in 0.2 s: .*refused"
    with pytest.raises(ConsensusError, match=text):
        TcpLink.connect(f"tcp://127.0.0.1:{port}/{'0' * 32}", config(2), 1, 0.2)


def test_something_else_at_the_address(config):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}/{'0' * 32}"
        with pytest.raises(ConsensusError, match="cannot be reached"):
            TcpLink.connect(address, config(2), 1, 0.2)  # it never answers


def test_the_cookie_of_another_group(links, config):
    leader = links.listen(config(2))
    stale = leader.address[:-32] + "0" * 32
    with pytest.raises(ConsensusError, match="it may be that of another group") as caught:
        links.connect(stale, config(2), 1, 0.5)
    assert leader.address[-32:] not in str(caught.value)
    assert leader.dropped >= 1
    links.connect(leader.address, config(2), 1)


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tcp://127.0.0.1/00", "tcp://h:99999/" + "0" * 32, "tcp://h:1/zz"]
)
def test_what_is_no_address(config, address):
    with pytest.raises(ConfigError, match="that is no address of a group"):
        TcpLink.connect(address, config(2), 1, 0.2)


@pytest.mark.parametrize("rank", ["1", True, 1.0, 1 << 70])
def test_what_is_no_rank(links, config, rank):
    leader = links.listen(config(2))
    with pytest.raises(ConfigError, match="is no number of a rank"):
        links.connect(leader.address, config(2), rank)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_no_group_listens_on_every_interface(config, host):
    with pytest.raises(ConfigError, match="stands for every interface"):
        TcpLink.listen(config(2), host)


def test_an_address_that_is_not_here_or_taken(links, config):
    with pytest.raises(ConfigError, match=r"cannot listen on host='192\.0\.2\.1', port=0"):
        TcpLink.listen(config(2), "192.0.2.1")
    port = int(links.listen(config(2)).address.split(":")[2].split("/")[0])
    with pytest.raises(ConfigError, match=f"port={port}.*in use"):
        TcpLink.listen(config(2), port=port)


# -- strangers


@contextmanager
def stranger(address, data):
    host, port = address.removeprefix("tcp://").split("/")[0].split(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        sock.sendall(data)
        yield sock


def cookie_of(address):
    return bytes.fromhex(address.rsplit("/", 1)[1])


def hello(cookie, rank=1, ranks=2, which=0, kind=Frame.HELLO):
    return pack_frame(kind, cookie, struct.pack("<qqB", rank, ranks, which) + b"a stranger")


STRANGERS = {
    "wrong cookie": lambda cookie: hello(bytes(16)),
    "wrong version": lambda cookie: hello(cookie)[:4] + b"\x63\0" + hello(cookie)[6:],
    "wrong magic": lambda cookie: b"L3CS" + hello(cookie)[4:],
    "too long": lambda cookie: hello(cookie)[:8] + struct.pack("<L", 1 << 30) + hello(cookie)[12:],
    "longer than a hello": lambda cookie: pack_frame(Frame.HELLO, cookie, bytes(2000)),
    "shorter than a hello": lambda cookie: pack_frame(Frame.HELLO, cookie, b"12"),
    "another kind": lambda cookie: hello(cookie, kind=Frame.REPORT),
    "garbage": lambda cookie: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "pickle": lambda cookie: b"\x80\x04\x95\x10" + bytes(100),
}


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("complete", [False, True], ids=["while joining", "in a complete group"])
def test_a_stranger_is_dropped_and_counted(links, config, name, complete):
    if complete:
        leader, follower = links.group(config(2))
    else:
        leader = links.listen(config(2))
    with stranger(leader.address, STRANGERS[name](cookie_of(leader.address))) as sock:
        sock.settimeout(10)
        with_nothing = ended(sock)
    assert with_nothing
    assert leader.dropped == 1
    if not complete:
        follower = links.connect(leader.address, config(2), 1)
        assert links.share([leader, follower], [b"a", b"b"]) == [[b"a", b"b"]] * 2
    leader.publish(b"goes on")
    assert links.record(follower) == b"goes on"


def ended(sock):
    """Whether the other end closes without a word."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [0, 5, 27, 30], ids=["silent", "5 bytes", "27 bytes", "30 bytes"])
def test_half_a_hello_delays_nobody(links, config, sent):
    hasty = config(2, peer_timeout_s=0.5)
    leader = links.listen(hasty)
    with stranger(leader.address, hello(cookie_of(leader.address))[:sent]) as sock:
        follower = links.connect(leader.address, hasty, 1)
        assert links.share([leader, follower], [b"a", b"b"]) == [[b"a", b"b"]] * 2
        assert leader.dropped == 0  # it may still go on
        sock.settimeout(10)
        assert ended(sock)
    assert leader.dropped == 1
    leader.publish(b"goes on")
    assert links.record(follower) == b"goes on"


def test_a_crowd_of_strangers_keeps_nobody_out(links, config):
    leader = links.listen(config(2))
    crowd = []
    try:
        for _ in range(100):
            with stranger(leader.address, b"L3CT") as sock:
                crowd.append(sock.dup())
        follower = links.connect(leader.address, config(2), 1)
        assert links.share([leader, follower], [b"a", b"b"]) == [[b"a", b"b"]] * 2
        assert leader.dropped >= 36  # 64 are heard at a time
    finally:
        for sock in crowd:
            sock.close()


def test_a_stranger_that_makes_room_for_another_may_speak_in_that_moment(links, config):
    """Both are seen in one turn of the leader's thread: the second one is no longer there."""
    leader, follower = links.group(config(2))
    crowd = []
    try:
        for _ in range(64):
            with stranger(leader.address, b"") as sock:
                crowd.append(sock.dup())
        until = time.monotonic() + 10
        while len(leader._guests) < 64 and time.monotonic() < until:
            time.sleep(0.01)
        with leader._news:  # the thread of the link stands still, with a report in its hand
            follower.report(b"")
            time.sleep(0.2)
            with stranger(leader.address, b"") as sock:
                crowd.append(sock.dup())
            crowd[0].sendall(bytes(28))
        crowd[0].settimeout(10)
        assert ended(crowd[0])
        leader.publish(b"goes on")
        assert links.record(follower) == b"goes on"
    finally:
        for sock in crowd:
            sock.close()
