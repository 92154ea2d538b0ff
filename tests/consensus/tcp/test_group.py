"""Groups of processes run alike, and no rank's slowness is an error."""

from __future__ import annotations

import hashlib
import queue
import random
import threading
from typing import Any

import pytest


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_have_the_same_effects(group, ranks):
    group.start(ranks, steps=400)
    ends = group.finished(400)
    assert len(ends) == ranks
    assert {end["capacity"] for end in ends} == {1000}  # the MIN of 1000, 1001, ...
    assert {end["dropped"] for end in ends} == {0}
    assert ends[0]["tickets"] > 200
    assert ends[0]["settled"] > 200


def test_ranks_that_are_slow_to_step_are_not_lost(group):
    """Two ranks sleep for longer than the timeout, and the third waits for them: all beat."""
    slow = {"sleep_at": 20, "sleep_s": 5.0}
    group.start(3, {0: slow, 1: slow}, steps=40)
    group.finished(40)


def test_a_rank_of_one_is_a_group(links, config):
    (alone,) = links.group(config(1))
    assert alone.share(b"mine", 1.0) == [b"mine"]
    alone.publish(b"to nobody")
    assert alone.reports() == {}
    alone.wait(0.01)


def test_records_come_in_order_and_whole(links, config):
    """Records of all sizes, one follower that reads while they come and one that is late."""
    leader, quick, late = links.group(config(3))
    chance = random.Random(5)
    records = [
        b"%d:" % number + chance.randbytes(chance.choice([0, 10, 300, 9000, 70_000]))
        for number in range(600)
    ]
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.extend(links.record(quick) for _ in records))
    reader.start()
    for record in records:
        leader.publish(record)
    reader.join(30)
    assert digest(got) == digest(records)
    assert digest([links.record(late) for _ in records]) == digest(records)
    assert late.receive() is None


def digest(records: list[bytes]) -> list[str]:
    return [hashlib.sha256(record).hexdigest() for record in records]


def test_the_newest_report_of_each_rank_is_kept(links, config):
    leader, *followers = links.group(config(3))
    for number in range(50):
        for rank, follower in enumerate(followers, 1):
            follower.report(b"%d of %d" % (number, rank))
    newest: dict[int, bytes] = {}
    while newest != {1: b"49 of 1", 2: b"49 of 2"}:
        leader.wait(5.0)
        found = leader.reports()
        assert found, "the leader waited for a report that had come"
        newest.update(found)
    assert leader.reports() == {}


def test_the_leader_is_called_when_a_report_has_come(links, config):
    leader, follower = links.group(config(2))
    found: queue.Queue[dict[int, bytes]] = queue.Queue()
    leader.on_report(lambda: found.put(dict(leader.reports())))
    for report in (b"one", b"two"):
        follower.report(report)
        assert found.get(timeout=20) == {1: report}


def test_blobs_are_shared_again_and_again(links, config):
    group = links.group(config(3))
    for turn in range(20):
        blobs = [b"%d of turn %d" % (rank, turn) for rank in range(3)]
        assert links.share(group, blobs) == [blobs] * 3


def test_a_record_before_a_share_is_not_lost(links, config):
    leader, follower = group = links.group(config(2))
    leader.publish(b"before")
    assert links.share(group, [b"a", b"b"]) == [[b"a", b"b"]] * 2
    leader.publish(b"behind")
    assert links.record(follower) == b"before"
    assert links.record(follower) == b"behind"


def test_what_a_rank_may_not_do_is_said(links, config):
    from l3store.errors import ConfigError, ConsensusError

    leader = links.listen(config(2))
    with pytest.raises(ConsensusError, match="before the ranks have met"):
        leader.publish(b"early")
    follower = links.connect(leader.address, config(2), 1)
    wrong: list[tuple[Any, str]] = [
        (leader.receive, "rank 0 leads"),
        (lambda: leader.report(b""), "rank 0 leads"),
        (follower.reports, "rank 1 does not lead"),
        (lambda: follower.on_report(print), "rank 1 does not lead"),
        (lambda: follower.publish(b""), "rank 1 does not lead"),
    ]
    for call, text in wrong:
        with pytest.raises(ConsensusError, match=text):
            call()
    with pytest.raises(ConfigError, match="bytes are shared; at most"):
        follower.share(bytes(16 << 20), 1.0)
