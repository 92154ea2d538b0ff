"""One rank of a group over TCP, as a process: joins, steps with tickets, and tells what it saw.

Told by one JSON line on its standard input; tells by JSON lines on its standard output, each with
the machine's monotonic clock.
"""

from __future__ import annotations

import ctypes
import json
import random
import signal
import sys
import time
from hashlib import sha256

from l3store.consensus.member import Member
from l3store.consensus.reports import Reports
from l3store.consensus.tcp import TcpLink
from l3store.consensus.values import Config, Grant, Settle, Span, Topology
from l3store.errors import ConfigError, ConsensusError
from l3store.testing.simulation.host import Boundless


def say(event: str, **what: object) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **what}), flush=True)


class Rank:
    """The engine's part: inputs are a function of the step, facts are this rank's own."""

    def __init__(self, member: Member, rank: int) -> None:
        self.member = member
        self.random = random.Random(rank)
        self.asked: list[tuple[int, int]] = []
        self.reading: dict[int, list[int]] = {}  # ticket: pages granted, pages done
        self.effects = sha256()
        self.settled = 0

    def step(self) -> None:
        facts = self.member.facts
        for effect in self.member.step():
            self.effects.update(repr(effect).encode())
            if isinstance(effect, Grant) and facts.enter(effect.ticket):
                self.reading[effect.ticket] = [effect.pages, 0]
            elif isinstance(effect, Settle):
                self.settled += effect.pages
        self._inputs(self.member.machine.number)
        while self.asked and self.random.random() < 0.7:
            ticket, pages = self.asked.pop()
            facts.hit(ticket, self.random.randint(pages // 2, pages))
        for ticket, (granted, done) in list(self.reading.items()):
            done += self.random.randint(0, granted - done)
            facts.progress(ticket, done)
            self.reading[ticket][1] = done
            if done == granted or self.random.random() < 0.2:
                facts.finish(ticket)
                facts.leave(ticket)
                del self.reading[ticket]

    def _inputs(self, step: int) -> None:
        member = self.member
        pages = 1 + step * 7 % 20
        ticket = member.submit(Span(f"r{step}", 0, 0, pages, b"tail %d" % step))
        if ticket is not None:
            self.asked.append((ticket, pages))
        if step % 5 == 0:
            self.effects.update(repr(member.abort(f"r{step - 3}")).encode())


def run(plan: dict[str, object]) -> None:
    rank = plan["rank"]
    fields = {"heartbeat_s": 0.2, "peer_timeout_s": 2.0, "policy": "wait_complete"}
    config = Config(Topology(plan["ranks"], tp=plan["ranks"]), **{**fields, **plan["config"]})
    timeout = plan["timeout_s"]
    if not plan["address"]:
        link = TcpLink.listen(config)
        say("address", address=link.address)
    else:
        link = TcpLink.connect(plan["address"], config, rank, timeout)
    say("connected")
    member = Member(Reports.join(link, config, 1000 + rank, timeout), Boundless())
    say("joined")
    member.facts.ready()
    engine = Rank(member, rank)
    try:
        while member.machine.number < plan["steps"]:
            engine.step()
            if member.machine.number in (20, 200):
                say("stepped", number=member.machine.number)
            if member.machine.number == plan["sleep_at"]:
                time.sleep(plan["sleep_s"])
            time.sleep(plan["work_s"])
    except ConsensusError as error:
        say("lost", text=str(error))
        for again in (member.step, lambda: link.wait(5.0), lambda: link.share(b"", 5.0)):
            try:
                again()
            except ConsensusError as same:
                say("again", text=str(same))
    finally:
        member.close()
    say(
        "end", steps=member.machine.number, effects=engine.effects.hexdigest(),
        settled=engine.settled, tickets=member.machine.next_ticket,
        capacity=member._agreement.capacity_pages, dropped=link.dropped,
    )  # fmt: skip


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no stray is left
    try:
        run(json.loads(sys.stdin.readline()))
    except (ConfigError, ConsensusError) as error:
        say("refused", kind=type(error).__name__, text=str(error))
