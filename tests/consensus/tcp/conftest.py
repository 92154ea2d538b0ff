"""Groups of real processes over TCP, and links in this process."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from l3store.consensus.tcp import TcpLink
from l3store.consensus.values import Config, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PATIENCE_S = 30.0


class Process:
    """One rank; its lines are read by a thread, so that none is ever held up by a full pipe."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.rank = plan["rank"]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_rank.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdin
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.close()

    def expect(self, event: str) -> dict[str, Any]:
        """The next line of this event; earlier lines are passed over."""
        until = time.monotonic() + _PATIENCE_S
        seen = []
        while True:
            try:
                line = self._lines.get(timeout=max(until - time.monotonic(), 0.01))
            except queue.Empty:
                pytest.fail(f"rank {self.rank} said no {event!r} in {_PATIENCE_S} s: {seen}")
            if line is None:
                pytest.fail(f"rank {self.rank} ended before {event!r}: {seen} {self.errors()}")
            if line["event"] == event:
                return line
            seen.append(line)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:  # some time may pass until all its threads have stopped
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def ended(self) -> int:
        """Waits for the process to end; returns its exit code."""
        return self._process.wait(_PATIENCE_S)

    def errors(self) -> str:
        assert self._process.stderr
        return self._process.stderr.read() if self._process.poll() is not None else ""

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_PATIENCE_S)
        self._reader.join(_PATIENCE_S)
        assert self._process.stdout
        assert self._process.stderr
        self._process.stdout.close()
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)


class Group:
    """Processes that are started with one plan; what a rank's own plan says comes first."""

    def __init__(self) -> None:
        self.processes: list[Process] = []

    def start(
        self, ranks: int, own: dict[int, dict[str, Any]] | None = None, **plan: Any
    ) -> list[Process]:
        common = {
            "config": {}, "timeout_s": 20.0, "steps": 1 << 30, "sleep_at": -1, "sleep_s": 0.0,
            "work_s": 0.002, "ranks": ranks, **plan,
        }  # fmt: skip
        own = own or {}
        for place in range(ranks):
            address = self.address if place else ""
            mine = {**common, "rank": place, "address": address, **own.get(place, {})}
            if mine["rank"] is None:  # it never comes
                continue
            process = Process(mine)
            self.processes.append(process)
            if not place:
                self.address = process.expect("address")["address"]
        return self.processes

    def finished(self, steps: int) -> list[dict[str, Any]]:
        """What each rank has to say at its end: all took every step, and all had one effect."""
        ends = [process.expect("end") for process in self.processes]
        assert {end["steps"] for end in ends} == {steps}
        assert len({end["effects"] for end in ends}) == 1
        assert {process.ended() for process in self.processes} == {0}
        return ends


@pytest.fixture
def group() -> Iterator[Group]:
    found = Group()
    yield found
    for process in found.processes:
        process.end()


@pytest.fixture
def config() -> Callable[..., Config]:
    def make(ranks: int, **fields: Any) -> Config:
        quick = {"heartbeat_s": 0.1, "peer_timeout_s": 2.0}
        return Config(Topology(ranks, tp=ranks), **{**quick, **fields})

    return make


class Links:
    """A group of links in this process; those that are made here are closed at the end."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    def listen(self, config: Config) -> Any:
        self.open.append(TcpLink.listen(config))
        return self.open[-1]

    def connect(self, address: str, config: Config, rank: int, timeout_s: float = 10.0) -> Any:
        self.open.append(TcpLink.connect(address, config, rank, timeout_s))
        return self.open[-1]

    def group(self, config: Config) -> list[Any]:
        """All ranks, which have met."""
        leader = self.listen(config)
        ranks = range(1, config.topology.ranks)
        links = [leader, *(self.connect(leader.address, config, rank) for rank in ranks)]
        self.share(links, [b""] * len(links))
        return links

    @staticmethod
    def share(links: list[Any], blobs: list[bytes], timeout_s: float = 10.0) -> list[Any]:
        """What each rank got of an all-gather: a list of blobs, or an error."""
        found: list[Any] = [None] * len(links)

        def run(place: int) -> None:
            try:
                found[place] = links[place].share(blobs[place], timeout_s)
            except Exception as error:
                found[place] = error

        threads = [threading.Thread(target=run, args=(place,)) for place in range(len(links))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE_S)
        return found

    @staticmethod
    def record(link: Any) -> bytes:
        """The next record of a follower; waits for it."""
        until = time.monotonic() + _PATIENCE_S
        while (record := link.receive()) is None:
            assert time.monotonic() < until
            link.wait(0.5)
        return record


@pytest.fixture
def links() -> Iterator[Links]:
    found = Links()
    yield found
    for link in found.open:
        link.close()
