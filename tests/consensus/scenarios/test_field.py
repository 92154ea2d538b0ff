from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from l3store.consensus.collective import Collective
from l3store.consensus.tcp import TcpLink
from l3store.consensus.values import Config, Topology
from l3store.testing.consensus import field_operations, field_pages, field_values, field_votes
from l3store.testing.consensus.field import FIELD
from l3store.testing.consensus.field_rank import Way
from l3store.testing.consensus.field_sees import all_of, all_see, cannot_go_on, every, refuses
from l3store.testing.consensus.field_stage import Stage, play
from l3store.testing.consensus.naive_votes import Voting
from l3store.testing.simulation.world import Policy

POLICIES = (Policy("reports"), Policy("collective", Collective))
CLASSES = (
    "hit length differs", "progress differs", "pop from empty list", "order deadlock",
    "silent mis-pair", "abort early exit", "order of tickets differs", "two threads, one group",
    "handle leak", "revoke alone", "LRU clock", "capacity differs", "allocation on one rank",
    "timeout verdict", "outage on one rank", "outage as a hang", "backup dies", "sidecar shorter",
    "second attempt", "cancel before ticket", "chunk model",
)  # fmt: skip
BY_NAME = {scenario.name: scenario for scenario in FIELD}
SCRIPTS = {
    "hit length differs": field_values.HIT,
    "progress differs": field_values.PROGRESS,
    "progress differs when the scheduler wants it": field_values.WANTED,
    "outage on one rank": field_values.OUTAGE,
    "order deadlock": field_votes.ORDER_DEADLOCK,
    "silent mis-pair": field_votes.MIS_PAIR,
    "abort early exit": field_votes.EARLY_EXIT,
    "order of tickets differs": field_votes.ORDER_DIFFERS,
    "two threads, one group": field_votes.TWO_THREADS,
    "allocation on one rank": field_pages.NO_ROOM,
    "outage as a hang": field_pages.QUERY_HANGS,
    "outage as a hang of a read": field_pages.READ_HANGS,
    "second attempt": field_pages.SECOND_ATTEMPT,
    "cancel before ticket": field_pages.CANCEL,
    "cancel right behind the ticket": field_pages.CANCEL_AT_ONCE,
    "pop from empty list": field_operations.POP,
    "backup dies": field_operations.BACKUPS,
}
ALSO_RIGHT_WITHOUT = {"hit length differs from what was asked"}
LONG = {"handle leak"}


def test_every_class_has_a_scenario():
    assert {scenario.source for scenario in FIELD} == {f"field: {name}" for name in CLASSES}


def test_names_are_unlike():
    assert len(BY_NAME) == len(FIELD)


@pytest.mark.parametrize(
    "name", [each.name for each in FIELD if each.name not in ALSO_RIGHT_WITHOUT | LONG]
)
def test_wrong_is_not_right(name):
    scenario = BY_NAME[name]
    assert not scenario.right(scenario.play(scenario.naive))
    assert not scenario.wrong(scenario.play(POLICIES[0]))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", SCRIPTS)
def test_four_ranks_come_to_the_same(name, policy):
    told = play(replace(SCRIPTS[name], ranks=4))(policy)
    assert BY_NAME[name].right(told), told.seen


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_skipped_vote_stops_every_rank(ranks):
    script = replace(field_votes.ORDER_DEADLOCK, ranks=ranks)
    assert cannot_go_on(*range(ranks))(play(script)(field_votes.VOTING))


class UnconditionalVotes(Voting):
    skips_empty = False


class AllVotes(Voting):
    exits_early = False


def test_a_vote_that_is_not_skipped_stops_nobody():
    told = play(field_votes.ORDER_DEADLOCK)(Way("unconditional votes", UnconditionalVotes))
    assert all_see(consumed={"write_through": [0]}, pins=0)(told), told.seen


def test_the_same_number_of_votes_on_every_rank_pairs_them_right():
    stage = Stage(field_votes.EARLY_EXIT, Way("all votes", AllVotes))
    told = stage.run()
    assert all_see(settled={"A": 128, "B": 256})(told), told.seen
    for rank in stage.ranks:
        heard = [vote for vote in rank.agreement.heard if vote[0] != "requests"]
        assert heard == [
            ("hit of 0", 384), ("batch 0 of 0", 128), ("batch 1 of 0", 128),
            ("batch 2 of 0", 128), ("hit of 1", 256), ("batch 0 of 1", 256),
            ("batch 1 of 1", 256),
        ]  # fmt: skip


def test_a_count_above_a_ranks_own_queue_is_refused_by_name_at_once():
    told = play(field_operations.POP)(field_operations.CHECKED)
    assert refuses("ends write_through 2", "has not ended on this rank")(told)
    assert told.seen[1].consumed == {}
    assert told.seen[1].steps < 20  # nobody waits for the half second of the third


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_an_ack_that_never_comes_holds_up_nothing_else(policy):
    script = replace(
        field_operations.STAYS_EMPTY,
        inputs=(*field_operations.STAYS_EMPTY.inputs, *field_values.PROGRESS.inputs),
        answers=field_values.PROGRESS.answers,
    )
    told = play(script)(policy)
    right = all_of(
        all_see(settled={"A": 300}, consumed={"write_through": [0, 1]}, pins=1),
        every(lambda seen: seen.settled_in["A"] < 20),
    )
    assert right(told), told.seen


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_an_abort_of_what_one_rank_has_ended_early_is_an_abort_on_all(policy):
    abort = field_pages.SECOND_ATTEMPT.inputs[1]
    script = replace(
        field_votes.EARLY_EXIT,
        inputs=(*field_votes.EARLY_EXIT.inputs, abort._replace(step=10)),
    )
    told = play(script)(policy)
    assert all_see(settled={"A": 0, "B": 256}, free=4096 - 256, held=0)(told), told.seen


def test_a_leader_over_tcp_holds_nothing_of_4000_sends():
    config = Config(Topology(2, tp=2), heartbeat_s=0.1, peer_timeout_s=5.0)
    leader = TcpLink.listen(config)
    follower = TcpLink.connect(leader.address, config, 1, 10.0)
    frame = bytes(1000)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda link: link.share(b"", 10.0), (leader, follower)))
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(4000):
                leader.publish(b"%04d" % number + frame)
                while (record := follower.receive()) is None:
                    follower.wait(5.0)
                assert int(record[:4]) == number
            after = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert after - before < 100 * len(frame)  # 4000 clones would be 40 times as much
    finally:
        follower.close()
        leader.close()
