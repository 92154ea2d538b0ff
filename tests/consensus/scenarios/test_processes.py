"""Scenarios of the field over real sockets: ranks are processes, links are tcp and gloo.

Under naive votes gloo must say what it says in the field; under our protocols the right result of
the scenario must appear, as in virtual time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from l3store.testing.consensus.field import FIELD
from l3store.testing.consensus.field_rank import Seen
from l3store.testing.consensus.field_script import Script
from l3store.testing.consensus.field_sees import all_of, all_see, every
from l3store.testing.consensus.field_stage import Told
from l3store.testing.simulation.plan import Plan

RANK = Path(__file__).with_name("_rank.py")
BY_NAME = {scenario.name: scenario for scenario in FIELD}
NAMES = (
    "hit length differs", "progress differs", "outage on one rank", "order deadlock",
    "silent mis-pair", "abort early exit", "outage as a hang", "outage as a hang of a read",
    "second attempt", "cancel before ticket", "pop from empty list",
)  # fmt: skip
FEW = ("hit length differs", "progress differs", "outage on one rank", "pop from empty list")
RIGHT = [("tcp", 2, NAMES), ("tcp", 4, FEW), ("gloo", 2, NAMES), ("gloo", 4, FEW)]
NAIVE = [
    ("naive", 2, ("order deadlock",)), ("naive", 2, ("silent mis-pair",)),
    ("naive", 2, ("outage on one rank",)), ("naive", 2, ("outage as a hang",)),
    ("unequal", 2, ("unequal",)), ("counts", 2, ("pop from empty list",)),
]  # fmt: skip
# How long it took at most is a matter of the machine.
WITHOUT_TIME = {
    "outage as a hang": all_see(granted={}, settled={"A": 0}, free=4096, held=0),
    "outage as a hang of a read": all_of(
        all_see(
            reused=False, settled={"A": 128, "B": 0, "C": 800}, held=0, free=1000 - 128 - 800
        ),
        every(lambda seen: seen.released_s["A"] >= 1.0),
    ),
}  # fmt: skip


class Groups:
    """What the processes of all groups left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.codes: dict[str, list[int]] = {}

    def run(self) -> None:
        waves: list[list[dict[str, Any]]] = [[], []]
        for how, ranks, names in (*NAIVE, *RIGHT):
            place = self.folder / self.name(how, ranks, names)
            place.mkdir()
            told = {"how": how, "ranks": ranks, "names": names, "folder": str(place)}
            waves[how == "gloo"].append(told)
        ended = subprocess.run(
            [sys.executable, str(RANK)], input=json.dumps(waves), capture_output=True, text=True,
            timeout=100, env={"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        every = [Path(told["folder"]).name for wave in waves for told in wave]
        self.codes = dict(zip(every, json.loads(ended.stdout), strict=True))

    @staticmethod
    def name(how: str, ranks: int, names: tuple[str, ...]) -> str:
        return f"{how}-{ranks}" if how in ("tcp", "gloo") else f"{how}-{names[0]}"

    def read(self, group: str, name: str) -> str:
        return (self.folder / group / name).read_text()

    def saw(self, group: str, name: str) -> list[Seen]:
        """What each rank that could still speak saw of a scenario."""
        found = []
        for rank in range(len(self.codes[group])):
            lines = map(json.loads, self.read(group, f"out{rank}").splitlines())
            found += [Seen(**line["seen"]) for line in lines if line["name"] == name]
        return found


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    found = Groups(tmp_path_factory.mktemp("field"))
    found.run()
    return found


@pytest.mark.parametrize(
    ("group", "ranks", "name"),
    [
        pytest.param(f"{how}-{ranks}", ranks, name, id=f"{how}-{ranks}-{name.replace(' ', '-')}")
        for how, ranks, names in RIGHT
        for name in names
    ],
)
def test_it_holds_between_processes(groups: Groups, group: str, ranks: int, name: str) -> None:
    seen = groups.saw(group, name)
    errors = [groups.read(group, f"err{rank}") for rank in range(ranks)]
    assert [each.rank for each in seen] == list(range(ranks)), errors
    told = Told(Plan(1, Script(ranks).config(), ()), seen=seen)
    right = WITHOUT_TIME.get(name, BY_NAME[name].right)
    assert not any(each.error for each in seen), seen
    assert right(told), seen
    assert groups.codes[group] == [0] * ranks


def test_a_skipped_vote_hangs_both_ranks_to_the_timeout_of_the_group(groups: Groups) -> None:
    first, second = groups.saw("naive-order deadlock", "order deadlock")
    for each in (first, second):
        assert "Timed out waiting" in each.error
        assert "operation to complete" in each.error
        assert each.consumed == {}
    assert first.steps == second.steps - 1  # in the vote on writes, and in the next broadcast


def test_a_skipped_vote_pairs_with_the_next_one_without_an_error(groups: Groups) -> None:
    first, second = groups.saw("naive-silent mis-pair", "silent mis-pair")
    assert second.granted == {"A": 1}  # hit_len = 1, the peer's ack count
    assert second.error == first.error == ""


def test_an_exception_before_a_vote_breaks_the_peers_connection(groups: Groups) -> None:
    group = "naive-outage on one rank"
    assert groups.codes[group] == [0, 1]
    assert "the store is unreachable" in groups.read(group, "err1")
    (first,) = groups.saw(group, "outage on one rank")
    words = ("Connection closed by peer", "Connection reset by peer")
    assert any(word in first.error for word in words), first.error
    assert first.settled == {}


def test_a_query_that_never_returns_hangs_the_peer_to_the_timeout_of_the_group(
    groups: Groups,
) -> None:
    seen = groups.saw("naive-outage as a hang", "outage as a hang")
    assert "Timed out waiting" in seen[0].error
    assert all(each.settled == each.granted == {} for each in seen)


def test_votes_of_unequal_sizes_abort_the_process(groups: Groups) -> None:
    assert -6 in groups.codes["unequal-unequal"]  # SIGABRT
    said = [groups.read("unequal-unequal", f"err{rank}") for rank in range(2)]
    assert any("op.preamble.length <= op.nbytes" in text for text in said)
    assert any("gloo::EnforceNotMet" in text for text in said)


def test_a_count_of_the_leader_pops_from_an_empty_list(groups: Groups) -> None:
    first, second = groups.saw("counts-pop from empty list", "pop from empty list")
    assert second.error == "IndexError: pop from empty list"
    assert first.consumed == {"write_through": [0, 1, 2]}
