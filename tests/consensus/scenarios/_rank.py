"""Ranks of scenarios of the field, each a process: the same scripts over real links.

Reads waves of groups as JSON from its standard input, and forks a process for each rank of a wave:
torch takes seconds to import. A group is played over tcp or gloo by our protocols, or by naive
ones; each rank writes to ``out<rank>`` in its folder a line of JSON for each scenario: what it saw.
Prints the exit codes of each group.
"""

from __future__ import annotations

import ctypes
import heapq
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from l3store.consensus.agreement import Agreement
from l3store.consensus.collective import Collective
from l3store.consensus.reports import Reports
from l3store.consensus.tcp import TcpLink
from l3store.testing.consensus import field_operations, field_pages, field_values, field_votes
from l3store.testing.consensus.field_rank import ScriptedRank, Way
from l3store.testing.consensus.naive_votes import UncheckedCounts, pack_vote, unpack_vote

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.testing.consensus.field_script import Script

SCRIPTS = {
    "hit length differs": field_values.HIT,
    "progress differs": field_values.PROGRESS,
    "outage on one rank": field_values.OUTAGE,
    "order deadlock": field_votes.ORDER_DEADLOCK,
    "silent mis-pair": field_votes.MIS_PAIR,
    "abort early exit": field_votes.EARLY_EXIT,
    "outage as a hang": field_pages.QUERY_HANGS,
    "outage as a hang of a read": field_pages.READ_HANGS,
    "second attempt": field_pages.SECOND_ATTEMPT,
    "cancel before ticket": field_pages.CANCEL,
    "pop from empty list": field_operations.POP,
}
NAIVE = {
    "outage as a hang": field_pages.NO_DEADLINE,
    "outage on one rank": field_values.NAIVE_VOTES,
    "order deadlock": field_votes.VOTING,
    "silent mis-pair": field_votes.ONE_GROUP,
}
GROUP_TIMEOUT_S = 2.0
SCALE = 5
"""How many times slower naive scripts run: what pairs with what is a matter of milliseconds."""
PATIENCE_S = 20.0
WAVE_S = 40.0


class Clock:
    """Real seconds, and what is to happen in them: on the one thread that turns."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale, self._numbers = scale, count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._elsewhere: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def after(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        due = time.monotonic() + delay * self._scale
        heapq.heappush(self._events, (due, next(self._numbers), action, args))

    def from_elsewhere(self, action: Callable[[], None]) -> None:
        self._elsewhere.put(action)

    def run_due(self) -> None:
        while not self._elsewhere.empty():
            self._elsewhere.get()()
        while self._events and self._events[0][0] <= time.monotonic():
            _, _, action, args = heapq.heappop(self._events)
            action(*args)


def turn(rank: ScriptedRank, clock: Clock, step_s: float) -> None:
    """Takes turns until the script is over."""
    until, due = time.monotonic() + PATIENCE_S, 0.0
    while not rank.done and time.monotonic() < until:
        clock.run_due()
        if time.monotonic() >= due and rank.turn():
            due = time.monotonic() + step_s
        time.sleep(0.002)


def said(name: str, rank: ScriptedRank) -> None:
    print(json.dumps({"name": name, "seen": asdict(rank.end())}), flush=True)


def config_of(script: Script, ranks: int) -> Any:
    return replace(script, ranks=ranks).config(peer_timeout_s=PATIENCE_S)


def right(name: str, link: Any, agreement: type[Agreement], ranks: int) -> None:
    """Plays a script with a shipped agreement."""
    script = replace(SCRIPTS[name], ranks=ranks)
    joined = agreement.join(link, config_of(script, ranks), script.capacity[0], PATIENCE_S)
    play(name, script, joined, Way("right"))


def play(name: str, script: Script, joined: Agreement, way: Way) -> None:
    clock = Clock()
    joined.facts.ready()
    rank = ScriptedRank(script, joined.rank, joined, way, clock.after, time.monotonic)
    turn(rank, clock, script.step_s)
    said(name, rank)
    if not rank.done or rank.seen.error:
        joined.close()  # the others hear of it
        sys.exit(f"{name}: {rank.seen}")
    joined.share(b"over", PATIENCE_S)  # whoever leaves first is lost for the others
    joined.close()


def tcp_link(number: int, rank: int, config: Any, folder: Path) -> Any:
    told = folder / f"address-{number}"
    if rank == 0:
        link = TcpLink.listen(config)
        (folder / "part").write_text(link.address)
        (folder / "part").rename(told)
        return link
    return TcpLink.connect(waited(told), config, rank, PATIENCE_S)


def waited(told: Path) -> str:
    until = time.monotonic() + PATIENCE_S
    while not told.exists():
        assert time.monotonic() < until, f"{told} was not told"
        time.sleep(0.01)
    return told.read_text()


def store(rank: int, ranks: int, folder: Path) -> Any:
    import torch.distributed as dist

    told = folder / "port"
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
        (folder / "part").write_text(str(served.port))
        (folder / "part").rename(told)
        return served
    return dist.TCPStore("127.0.0.1", int(waited(told)), ranks, False)


# -- naive


class Votes:
    """MIN all-reduces of one number over process groups, each group's in the order of the calls."""

    def __init__(self, groups: dict[str, Any], clock: Clock) -> None:
        self.error = ""
        self._clock = clock
        self._queues: dict[str, queue.SimpleQueue[Any]] = {}
        for name, group in groups.items():
            self._queues[name] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(name, group), daemon=True).start()

    def vote(self, group: str, frame: bytes, take: Callable[[bytes], None]) -> None:
        self._queues[group].put((frame, take))

    def _run(self, name: str, group: Any) -> None:
        import torch
        import torch.distributed as dist

        while True:
            frame, take = self._queues[name].get()
            number = torch.tensor([unpack_vote(frame)])
            try:
                dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
            except RuntimeError as error:
                self.error = self.error or str(error)
                return
            self._clock.from_elsewhere(partial(take, pack_vote(int(number.item()))))


class NoLink:
    """Votes are all that naive ranks exchange."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def naive(name: str, rank: int, ranks: int, folder: Path) -> None:
    """Plays a script with votes as engines hold them, over gloo."""
    import torch.distributed as dist

    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    served = store(rank, ranks, folder)
    dist.init_process_group("gloo", store=served, rank=rank, world_size=ranks)
    way, script, clock = NAIVE[name], SCRIPTS[name], Clock(SCALE)
    names = sorted(set(way.agreement.groups.values()))
    votes = Votes({each: dist.new_group(timeout=timeout) for each in names}, clock)
    config = config_of(script, ranks)
    agreement = way.agreement(NoLink(rank), config, 0, script.capacity[0], time.monotonic)
    agreement.facts.ready()
    agreement.begin(votes.vote, clock.after)
    played = ScriptedRank(script, rank, agreement, way, clock.after, time.monotonic)
    until, due = time.monotonic() + PATIENCE_S, 0.0
    over = [f"over/{each}" for each in range(ranks)]
    while not votes.error and time.monotonic() < until:
        clock.run_due()
        if time.monotonic() >= due and played.turn():
            due = time.monotonic() + script.step_s * SCALE
        if played.calls.died:
            raise ConnectionError(played.calls.died)  # what ends a thread ends the process
        if played.seen.settled:  # the slip has happened
            served.set(over[rank], "yes")
            if served.check(over):
                break
        time.sleep(0.002)
    played.seen.error = played.seen.error or votes.error
    said(name, played)
    if rank == 0:
        time.sleep(1.0)  # the store ends with this process
    sys.stdout.flush()
    os._exit(0)  # threads are still in gloo


def unequal(rank: int, ranks: int, folder: Path) -> None:
    """Each rank votes on as many queues as it has: two numbers, and one."""
    import torch
    import torch.distributed as dist

    served = store(rank, ranks, folder)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=served, rank=rank, world_size=ranks, timeout=timeout)
    dist.all_reduce(torch.zeros(64 if rank else 1), dist.ReduceOp.MIN)
    print(json.dumps({"name": "unequal", "seen": None}), flush=True)


def play_group(how: str, rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    if how == "tcp":
        for number, name in enumerate(names):
            link = tcp_link(number, rank, config_of(SCRIPTS[name], ranks), folder)
            right(name, link, Reports, ranks)
    elif how == "counts":
        script = replace(SCRIPTS[names[0]], ranks=ranks)
        link = tcp_link(0, rank, config_of(script, ranks), folder)
        # Its own way to join would meet nobody.
        join: Any = Agreement.join.__func__  # type: ignore[attr-defined]
        joined = join(UncheckedCounts, link, config_of(script, ranks), script.capacity[0])
        play(names[0], script, joined, field_operations.COUNTS)
    elif how == "gloo":
        from l3store.consensus.gloo import GlooLink

        served = store(rank, ranks, folder)
        for name in names:
            config = config_of(SCRIPTS[name], ranks)
            link = GlooLink.create(served, config, rank, name=name.replace(" ", "-"))
            right(name, link, Collective, ranks)
    elif how == "naive":
        naive(names[0], rank, ranks, folder)
    else:
        unequal(rank, ranks, folder)


def fork(group: dict[str, Any], rank: int) -> int:
    """Starts a rank; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no stray is left
        folder = Path(group["folder"])
        for number, name in ((1, "out"), (2, "err")):
            opened = os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(opened, number)
        play_group(group["how"], rank, group["ranks"], folder, group["names"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def reap(child: int, until: float) -> int:
    """Returns the exit code of a rank; one that does not end in time is killed."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    waves = json.load(sys.stdin)
    if any(group["how"] in ("gloo", "naive", "unequal") for wave in waves for group in wave):
        import torch.distributed  # noqa: F401, before the fork
    codes = []
    for wave in waves:
        started = [[fork(group, rank) for rank in range(group["ranks"])] for group in wave]
        until = time.monotonic() + WAVE_S
        codes += [[reap(child, until) for child in group] for group in started]
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
