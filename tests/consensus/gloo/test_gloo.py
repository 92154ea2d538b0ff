"""Groups over real gloo, each rank a process: it works, and what ends it has a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("rank.py")
PEER_TIMEOUT_S = 2.0  # as in rank.py
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


class Groups:
    """Starts groups of ranks, and tells what each rank has seen."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    def __call__(self, mode: str, ranks: int, *args: object, victim: int | None = None):
        """Returns what each rank but the victim has seen; they must have ended with exit code 0."""
        ask = {
            "mode": mode, "ranks": ranks, "args": [str(each) for each in args], "victim": victim,
            "folder": str(self._folder),
        }  # fmt: skip
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        for rank in range(ranks):
            log = (self._folder / f"log.{rank}").read_text()
            assert rank == victim or codes.get(str(rank)) == 0, f"rank {rank}: {codes}\n{log}"
        return {
            int(rank): json.loads((self._folder / f"said.{rank}").read_text()) for rank in codes
        }


@pytest.fixture(scope="module")
def forks():
    process = subprocess.Popen(
        [sys.executable, str(RANK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **QUIET},
    )  # fmt: skip
    with process:
        yield process
        process.stdin.close()


@pytest.fixture
def group(forks, tmp_path):
    return Groups(forks, tmp_path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_hundreds_of_steps_have_the_same_effects_on_every_rank(group, ranks):
    found = group("steps", ranks)
    assert len({said["seen"] for said in found.values()}) == 1
    first = found[0]
    assert first["settled"]
    assert first["counts"]["Grant"] == first["counts"]["Release"] > 20
    assert first["counts"]["Consume"] > 50
    for said in found.values():
        assert said["spare"] == [len("blob of rank 0") * rank for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "how", "victim"),
    [
        (2, "SIGKILL", 0),
        (4, "SIGKILL", 0),
        (4, "SIGKILL", 2),
        (4, "SIGSTOP", 1),
        (2, "SIGSTOP", 0),
        (2, "leave", 1),
    ],
)
def test_a_rank_that_is_lost_is_named_on_every_other_one(group, ranks, how, victim):
    found = group("lost", ranks, how, victim, victim=victim)
    for said in found.values():
        assert said["error"].startswith(f"PeerLost: rank {victim} (pp 0, cp 0, tp {victim}) ")
        assert "in step " in said["error"]
        assert said["rank"] == victim
        assert said["after"] <= PEER_TIMEOUT_S + 1
        assert ("has left the group" if how == "leave" else "is lost: ") in said["error"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_follower_that_leaves_and_ends_is_named_on_every_other_rank(group, ranks):
    found = group("lost", ranks, "exit", 1)
    assert found.pop(1) == {}
    for said in found.values():
        assert said["error"].startswith("PeerLost: rank 1 (pp 0, cp 0, tp 1) has left the group")
        assert said["after"] <= PEER_TIMEOUT_S + 1


def test_a_store_that_ends_with_its_server_is_not_blamed_for_a_rank_that_left(group):
    assert group("early", 3)[2]["error"] == "rank 1 (pp 0, cp 0, tp 1) has left the group"


@pytest.mark.parametrize("how", [*map(str, range(5)), "late"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_record_comes_before_the_leaders_goodbye(group, ranks, how):
    """Its process, which serves the store, ends right after its last record."""
    steps = 40
    found = group("last", ranks, steps, how)
    assert found.pop(0) == {"last": steps, "on": True, "error": None}
    for said in found.values():
        assert said["last"] == steps
        assert said["error"] == (
            "PeerLost: rank 0 (pp 0, cp 0, tp 0) has left the group; in step 41; tickets open: 0"
        )


def test_a_record_that_the_engine_carries_is_accepted_when_the_leader_has_left(group):
    assert group("carried", 2, 5)[1] == {
        "last": 5,
        "error": "rank 0 (pp 0, cp 0, tp 0) has left the group; in step 6",
    }


def test_what_was_shared_comes_although_the_leader_has_left(group):
    assert group("shared", 2, "after")[1] == {"shared": ["blob", "own"]}


def test_a_leader_that_left_before_all_have_shared_is_named(group):
    assert group("shared", 2, "before")[1] == {
        "error": "rank 0 (pp 0, cp 0, tp 0) has left the group"
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_records_that_are_on_their_way_when_the_leader_leaves_all_come(group, ranks):
    found = group("burst", ranks, 40)
    del found[0]
    for said in found.values():
        assert said["came"] == list(range(40))
        assert said["error"] == "Left: rank 0 (pp 0, cp 0, tp 0) has left the group"


def test_an_unequal_configuration_is_refused_on_every_rank(group):
    found = group("unequal", 2)
    for said in found.values():
        assert said["error"].startswith("ConfigError: batch_pages differs: 4 on rank 0")
        assert "8 on rank 1" in said["error"]


def test_frames_of_unequal_length_never_reach_gloo(group):
    found = group("refused", 2)
    for said in found.values():
        between, equal, alone = said["found"]
        assert between.startswith("hits: frames have 100 bytes on rank 0")
        assert "110 on rank 1" in between
        assert equal == [50, 50]
        assert alone == "progress: a frame of 51 bytes; all have 50"


def test_the_ranks_of_a_group_are_counted_before_it_is_made(group):
    found = group("roll", 2)
    twice, missing, counted = zip(*(said["found"] for said in found.values()), strict=True)
    assert sum("two processes claim rank 1" in text for text in twice) == 1
    assert all("rank 2 (pp 0, cp 0, tp 2) did not come within 2 s" in text for text in missing)
    assert any("ranks differs: 2 on rank 0, 3 on rank 1" in text for text in counted)
    assert any("ranks differs: 3 on rank 1, 2 on rank 0" in text for text in counted)


def test_groups_of_the_engine_carry_a_link_without_a_store(group):
    found = group("groups", 2, "SIGKILL", 1, victim=1)
    assert found[0]["refused"] == [
        "unknown group 'hit'; did you mean 'hits'? Known: hits, progress, records, share, state",
        "no group for state; a link needs share, records, hits, progress, state",
    ]
    assert found[0]["error"].startswith(
        "PeerLost: a rank is lost, and rank 0 (pp 0, cp 0, tp 0) cannot tell which: "
    )
    assert "in step " in found[0]["error"]


def test_a_different_span_is_named_on_every_rank(group):
    found = group("spans", 2)
    for said in found.values():
        assert "ticket 1, submitted in step" in said["error"]
        assert "rank 1 (pp 0, cp 0, tp 1) has another span than rank 0" in said["error"]


def test_without_torch_the_extra_is_named():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from l3store.consensus.gloo import GlooLink\n"
        "from l3store.consensus.values import Config, Topology\n"
        "GlooLink.create(None, Config(Topology(1)), 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (
        "ConfigError: a link over gloo needs torch: pip install 'l3store[engine]'" in ended.stderr
    )


def test_an_idle_group_costs_little(group):
    """Not a bound on time, but on turns: nobody spins while nothing happens."""
    found = group("idle", 2)
    for said in found.values():
        assert said["rounds"] <= 2 * said["seconds"] * (1 / said["slowest"] + 2 / said["heartbeat"])
        assert said["rounds"] >= said["seconds"] / said["heartbeat"]
        assert said["in_gloo"] == 0  # after it was closed: or the end of the process is an abort
        print(f"idle: {said['cpu'] / said['seconds']:.1%} of a core, {said['rounds']} rounds")


def test_a_rank_that_ends_without_a_word_ends_well(group):
    """Its threads wait for the others' votes and records; no exit code but 0 would be accepted."""
    assert all(said["steps"] >= 10 for said in group("exit", 2).values())
