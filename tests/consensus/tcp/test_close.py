"""Whatever a group was, nothing of it is left when it is closed."""

from __future__ import annotations

import os
import threading
import time

import pytest

from l3store.consensus.member import Member
from l3store.consensus.reports import Reports
from l3store.consensus.tcp import TcpLink
from l3store.consensus.tcp_end import _LINGER_S
from l3store.errors import ConfigError, ConsensusError
from l3store.testing.simulation.host import Boundless

ROUNDS = 20


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("l3store")}


@pytest.fixture
def nothing_is_left():
    before, running = descriptors(), threads()
    yield
    assert threads() == running
    assert descriptors() == before


@pytest.mark.parametrize("leaves", [0, 1])
def test_no_connection_ends_before_the_goodbye(config, leaves):
    """The thread that closes stands still in it, and the link's thread has its turns."""
    leader = TcpLink.listen(config(2))
    links = [leader, TcpLink.connect(leader.address, config(2), 1)]
    other = threading.Thread(target=links[1].share, args=(b"", 10.0))
    other.start()
    leader.share(b"", 10.0)
    other.join()
    part = links[leaves]._part

    def late(meant):
        links[leaves]._wake()
        time.sleep(2 * _LINGER_S)
        part(meant)

    links[leaves]._part = late
    links[leaves].close()
    stays = links[1 - leaves]

    def hear():
        while True:
            stays.wait(5.0)
            if stays.rank:
                stays.receive()

    with pytest.raises(ConsensusError, match=rf"rank {leaves} \(.*\) has left the group"):
        hear()
    stays.close()


@pytest.mark.usefixtures("nothing_is_left")
def test_groups_that_come_and_go(config):
    for turn in range(ROUNDS):
        leader = TcpLink.listen(config(3))
        links = [leader, *(TcpLink.connect(leader.address, config(3), rank) for rank in (1, 2))]
        members = [None] * 3

        def join(rank, links=links, members=members):
            members[rank] = Member(Reports.join(links[rank], config(3), 10, 10.0), Boundless())

        joins = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for thread in joins:
            thread.start()
        for thread in joins:
            thread.join()
        for _ in range(5):
            for member in members:
                member.step()
        assert len(threads()) >= 5  # two report, three serve
        order = members if turn % 2 else members[::-1]
        for member in order:
            member.close()
            member.close()


@pytest.mark.usefixtures("nothing_is_left")
def test_groups_that_fail(config):
    for _ in range(ROUNDS):
        leader = TcpLink.listen(config(3))
        first = TcpLink.connect(leader.address, config(3), 1)
        with pytest.raises(ConfigError):
            TcpLink.connect(leader.address, config(3), 1)
        with pytest.raises(ConfigError):
            first.share(b"", 5.0)
        first.close()
        leader.close()
        with pytest.raises(ConsensusError):
            TcpLink.connect(leader.address, config(3), 2, 0.1)


@pytest.mark.usefixtures("nothing_is_left")
def test_a_group_that_is_alone_when_it_closes(config):
    for _ in range(ROUNDS):
        TcpLink.listen(config(2)).close()


@pytest.mark.usefixtures("nothing_is_left")
def test_a_close_while_another_thread_waits(config, links):
    for rank in (0, 1):
        leader = TcpLink.listen(config(2))
        pair = [leader, TcpLink.connect(leader.address, config(2), 1)]
        assert links.share(pair, [b"a", b"b"]) == [[b"a", b"b"]] * 2
        caught = []

        def wait(link=pair[rank], caught=caught):
            try:
                link.wait(30.0)
            except ConsensusError as error:
                caught.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        pair[rank].close()
        waiting.join(5)
        assert caught == [f"the link of rank {rank} is closed"]
        pair[1 - rank].close()
