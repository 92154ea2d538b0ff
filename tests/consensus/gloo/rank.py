"""Ranks of groups over gloo, each in a process of its own: gloo may abort it, some are killed."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from threading import Event

import torch.distributed as dist

from l3store.consensus.beats import LEFT, Beats
from l3store.consensus.collective import Collective
from l3store.consensus.gloo import GROUPS, GlooLink
from l3store.consensus.member import Member
from l3store.consensus.state import SLOWEST
from l3store.consensus.values import (
    Config,
    Grant,
    Kind,
    Release,
    Settle,
    Span,
    Storage,
    Topology,
)
from l3store.errors import ConfigError, ConsensusError, L3Error
from l3store.testing.simulation.host import Boundless

PEER_TIMEOUT_S = 2.0


class Engine:
    """Gives its member the same inputs on every rank, and reads at this rank's own pace."""

    def __init__(self, member: Member, rank: int) -> None:
        self.member, self.facts = member, member.facts
        self.inputs, self.own = random.Random(5), random.Random(rank)
        self.reading: dict[int, list[int]] = {}  # ticket: pages wanted, pages read
        self.issued: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        self.seen = blake2b(digest_size=8)
        self.counts: dict[str, int] = {}
        self.facts.ready()

    def step(self, *, submit: bool = True) -> None:
        for effect in self.member.step():
            self.seen.update(repr((self.member.machine.number, effect)).encode())
            name = type(effect).__name__
            self.counts[name] = self.counts.get(name, 0) + 1
            if isinstance(effect, Grant):
                assert self.facts.enter(effect.ticket)
                self.reading[effect.ticket] = [effect.pages, 0]
            elif isinstance(effect, Settle) and effect.ticket in self.reading:
                self.reading[effect.ticket][0] = 0
            elif isinstance(effect, Release | Storage):
                pass
        if submit:
            self._submit()
        for kind, ops in self.issued.items():
            if ops and self.own.random() < 0.5:
                op = ops.pop(0 if kind.in_order else self.own.randrange(len(ops)))
                self.facts.ack(kind, op, ok=self.own.random() < 0.8)
        for ticket, (wanted, read) in list(self.reading.items()):
            if read < wanted and self.own.random() < 0.95:
                self.reading[ticket][1] = self.own.randint(read + 1, wanted)
                self.facts.progress(ticket, self.reading[ticket][1])
            else:
                del self.reading[ticket]
                self.facts.finish(ticket)
                self.facts.leave(ticket)

    def _submit(self) -> None:
        number = self.member.machine.number
        if self.inputs.random() < 0.3:
            pages = self.inputs.randint(1, 20)
            ticket = self.member.submit(Span(f"r{number}", 0, 0, pages, b"tail"))
            if ticket is not None:
                self.facts.hit(ticket, self.own.randint(0, pages))
        if self.inputs.random() < 0.1:
            self.member.abort(f"r{number - 2}")
        if self.inputs.random() < 0.3:
            kind = self.inputs.choice(list(Kind))
            self.issued[kind].append(self.member.issue(kind))

    def settled(self) -> bool:
        machine = self.member.machine
        return not machine.tickets and all(ops.ended.floor == ops.issued for ops in machine.ops)


def store(folder: Path, rank: int, ranks: int) -> dist.TCPStore:
    """Rank 0 serves it, and says at which port."""
    told = folder / "port"
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
        (folder / "port.part").write_text(str(served.port))
        (folder / "port.part").rename(told)
        return served
    while not told.exists():
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(told.read_text()), ranks, False)


def steps(link: GlooLink, config: Config, folder: Path, count: int) -> dict[str, object]:
    """Steps, with everything an engine does; then until all has ended."""
    member = Member(Collective.join(link, config, 100 + link.rank, 20.0), Boundless())
    engine = Engine(member, link.rank)
    for _ in range(count):
        engine.step()
    last = count
    while last < 3 * count and not engine.settled():
        engine.step(submit=False)
        last += 1
    spare = link.share(f"blob of rank {link.rank}".encode() * link.rank, 10.0)
    return {
        "seen": engine.seen.hexdigest(), "counts": engine.counts, "steps": last,
        "settled": engine.settled(), "spare": [len(each) for each in spare],
    }  # fmt: skip


def lost(link: GlooLink, config: Config, folder: Path, how: str, victim: int) -> dict[str, object]:
    """One rank ends in the middle of steps; the others are to hear of it."""
    member = Member(Collective.join(link, config, 100, 20.0), Boundless())
    engine = Engine(member, link.rank)
    try:
        while True:
            engine.step()
            if link.rank == victim and member.machine.number == 40:
                (folder / "at.part").write_text(str(time.time()))
                (folder / "at.part").rename(folder / "at")
                if how in ("leave", "exit"):
                    member.close()
                    time.sleep(4 * PEER_TIMEOUT_S * (how == "leave"))
                    return {}
                os.kill(os.getpid(), getattr(signal, how))
    except ConsensusError as error:
        after = time.time() - float((folder / "at").read_text())
        return {
            "error": f"{type(error).__name__}: {error}", "after": after,
            "rank": getattr(error, "rank", None),
        }  # fmt: skip


def late(link: GlooLink) -> None:
    """Has the goodbye come after votes have failed, because the leader's process has ended.

    Nothing else tells that it has left: the link is one without a store.
    """
    link._beats = None
    failed, hits, records = Event(), link._lanes["hits"], link._lanes["records"]
    gather, broadcast = hits.gather, records.broadcast

    def watched(frame: bytes, timeout_s: float | None = None) -> list[bytes]:
        try:
            return gather(frame, timeout_s)
        except RuntimeError:
            failed.set()
            raise

    def slow(chunk: bytes) -> bytes:
        came = broadcast(chunk)
        if link.rank and came.startswith(b"\xff" * 4):
            assert failed.wait(5.0)
            time.sleep(0.2)
        return came

    hits.gather, records.broadcast = watched, slow


def last(link: GlooLink, config: Config, steps: int, how: str) -> dict[str, object]:
    """The leader makes its last record, and ends at once, with a ticket open; others are slower."""
    if how == "late":
        late(link)
    member = Member(Collective.join(link, config, 100, 20.0), Boundless())
    member.facts.ready()
    machine, error = member.machine, None
    try:
        while link.rank or machine.number < steps:
            time.sleep(0.005 * link.rank)
            member.step()
            if machine.number == steps - 5 and machine.storage_on:
                member.submit(Span("open", 0, 0, 8, b"tail"))
    except ConsensusError as told:
        error = f"{type(told).__name__}: {told}"
    member.close()
    return {"last": machine.number, "on": machine.storage_on, "error": error}


def carried(link: GlooLink, config: Config, folder: Path, steps: int) -> dict[str, object]:
    """The engine carries the records, and is slow: the leader has left when the first one comes."""
    member = Member(Collective.join(link, config, 100, 20.0), Boundless())
    records = [folder / f"record.{number}" for number in range(steps)]
    if link.rank == 0:
        for record in records:
            record.write_bytes(member.decide())
            member.accept(record.read_bytes())
        member.close()
        return {}
    limit = time.monotonic() + 20.0
    while member._agreement._failure is None and time.monotonic() < limit:
        time.sleep(0.01)
    for record in records:
        member.accept(record.read_bytes())
    try:
        member.poll()
    except ConsensusError as error:
        return {"last": member.machine.number, "error": str(error)}
    return {"last": member.machine.number, "error": None}


class LateWork:
    """Work of gloo that is seen to be complete after the leader's goodbye only."""

    def __init__(self, link: GlooLink, work: object) -> None:
        self.wait, self._link, self._work = work.wait, link, work

    def is_completed(self) -> bool:
        if self._link._failure is None:
            return False
        return time.monotonic() > self._link._failed_at + 0.2 and self._work.is_completed()


def shared(link: GlooLink, what: str) -> dict[str, object]:
    """The leader leaves right after it has shared; or, as it should not, before."""
    link.share(b"", 20.0)
    if link.rank == 0:
        if what == "after":
            link.share(b"blob", 20.0)
        link.close()
        time.sleep(2.0 * PEER_TIMEOUT_S * (what == "before"))
        return {}
    lane = link._lanes["share"]
    finish, began = lane._finish, []

    def late(work: object) -> None:
        began.append(work)
        finish(LateWork(link, work) if len(began) == 2 else work)

    lane._finish = late
    try:
        return {"shared": [each.decode() for each in link.share(b"own", 20.0)]}
    except ConsensusError as error:
        return {"error": str(error)}


def burst(link: GlooLink, count: int) -> dict[str, object]:
    """The leader sends long records and leaves; the others look when all is over."""
    link.share(b"", 20.0)
    if link.rank == 0:
        for number in range(count):
            link.publish(b"%d " % number * 3000)
        link.close()
        return {}
    time.sleep(PEER_TIMEOUT_S / 2)
    came, error = [], None
    try:
        while True:
            link.wait(0.1)
            record = link.receive()
            if record is not None:
                numbers = set(record.split())
                came.append(int(numbers.pop()) if len(numbers) == 1 else -1)
    except ConsensusError as told:
        error = f"{type(told).__name__}: {told}"
    return {"came": came, "error": error}


def early(folder: Path, config: Config, rank: int, ranks: int) -> dict[str, object]:
    """Rank 1 leaves, and of that the one that serves the store ends before rank 2 believes it."""
    served = store(folder, rank, ranks)
    beats = Beats(served.clone(), config, rank, 0, lambda lost: None)
    beats.start()
    if rank == 1:
        beats.close()
    elif rank == 0:
        while served.get("beat/1") != LEFT:
            time.sleep(0.01)
        time.sleep(3 * beats._every)
    else:
        while not beats._mute():
            time.sleep(0.01)
        return {"error": str(beats.judge())}
    return {}


def refused(link: GlooLink, config: Config, folder: Path) -> dict[str, object]:
    """Votes of two lengths: between the ranks, then on one of them."""
    found = []
    for purpose, length in (("hits", 100 + 10 * link.rank), ("progress", 50)):
        try:
            found.append([len(frame) for frame in link.gather(purpose, bytes(length))])
        except ConsensusError as error:
            found.append(str(error))
    try:
        link.gather("progress", bytes(51))
    except ConsensusError as error:
        found.append(str(error))
    link.gather("state", b"done")
    return {"found": found}


def roll(folder: Path, rank: int, ranks: int) -> dict[str, object]:
    """What can be wrong with the ranks before there is a group."""
    served = store(folder, rank, ranks)
    found = []
    for name, config, claimed in (
        ("twice", Config(Topology(2, tp=2)), 1),
        ("missing", Config(Topology(3, tp=3)), rank),
        ("counted", Config(Topology(2 + rank, tp=2 + rank)), rank),
    ):
        # They start each together: one that came late would be the missing rank itself.
        served.set(f"{name}/{rank}", "here")
        served.wait([f"{name}/{other}" for other in range(ranks)])
        try:
            GlooLink.create(served, config, claimed, name=name, timeout_s=2.0)
        except L3Error as error:
            found.append(str(error))
    served.set(f"ready/{rank}", "yes")
    served.wait([f"ready/{other}" for other in range(ranks)])
    time.sleep(0.2 * (rank == 0))
    return {"found": found}


def groups(folder: Path, config: Config, rank: int, ranks: int, how: str) -> dict[str, object]:
    """The engine has its groups already, and gives no store."""
    served = store(folder, rank, ranks)
    dist.init_process_group("gloo", store=served, rank=rank, world_size=ranks)
    made = {name: dist.new_group(backend="gloo") for name in GROUPS}
    refused = []
    for wrong in ({**made, "hit": made["hits"]}, {k: v for k, v in made.items() if k != "state"}):
        try:
            GlooLink(wrong, config)
        except ConfigError as error:
            refused.append(str(error))
    said = lost(GlooLink(made, config), config, folder, how, 1)
    return {**said, "refused": refused}


def spans(link: GlooLink, config: Config) -> dict[str, object]:
    """Rank 1 submits another span than rank 0."""
    member = Member(Collective.join(link, config, 100, 20.0), Boundless())
    member.facts.ready()
    try:
        while not member.machine.storage_on:
            member.step()
        for rid, start in (("a", 5), ("b", 5 - 2 * link.rank)):
            ticket = member.submit(Span(rid, 0, start, 15 - start, b"tail"))
            member.facts.hit(ticket, 1)
        limit = time.monotonic() + 20.0  # votes need no step
        while member._agreement._failure is None and time.monotonic() < limit:
            time.sleep(0.01)
        member.step()
    except ConsensusError as error:
        return {"error": str(error)}
    return {"error": None}


def idle(link: GlooLink, config: Config) -> dict[str, object]:
    """Joins, and does nothing for a while."""
    member = Member(Collective.join(link, config, 100, 20.0), Boundless())
    time.sleep(1.0)
    rounds, cpu, began = member._agreement._rounds, time.process_time(), time.monotonic()
    time.sleep(2.0)
    rounds, cpu = member._agreement._rounds - rounds, time.process_time() - cpu
    seconds = time.monotonic() - began
    member.close()
    return {
        "rounds": rounds, "cpu": cpu, "seconds": seconds, "in_gloo": link._busy,
        "slowest": SLOWEST * config.interval_s, "heartbeat": config.heartbeat_s,
    }  # fmt: skip


def run(mode: str, rank: int, ranks: int, folder: Path, args: list[str]) -> dict[str, object]:
    config = Config(
        Topology(ranks, tp=ranks), batch_pages=4, max_pages=64, heartbeat_s=0.25,
        peer_timeout_s=PEER_TIMEOUT_S,
    )  # fmt: skip
    if mode == "roll":
        return roll(folder, rank, ranks)
    if mode == "groups":
        return groups(folder, config, rank, ranks, args[0])
    if mode == "early":
        return early(folder, config, rank, ranks)
    if mode == "unequal" and rank == 1:
        config = replace(config, batch_pages=8)
    link = GlooLink.create(store(folder, rank, ranks), config, rank, timeout_s=30.0)
    if mode == "lost":
        return lost(link, config, folder, args[0], int(args[1]))
    if mode == "exit":  # without a word: ranks and their interpreters end as they come
        return steps(link, config, folder, 10)
    try:
        if mode == "last":
            return last(link, config, int(args[0]), args[1])
        if mode == "carried":
            return carried(link, config, folder, int(args[0]))
        if mode == "shared":
            return shared(link, args[0])
        if mode == "burst":
            return burst(link, int(args[0]))
        if mode == "refused":
            return refused(link, config, folder)
        if mode == "spans":
            return spans(link, config)
        if mode == "idle":
            return idle(link, config)
        return steps(link, config, folder, 300)
    finally:
        link.close()


def be_rank(mode: str, rank: int, ranks: int, folder: Path, args: list[str]) -> None:
    """Runs as a rank; what it has seen is in a file."""
    try:
        said = run(mode, rank, ranks, folder, args)
    except L3Error as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"said.{rank}").write_text(json.dumps(said))


def start(mode: str, rank: int, ranks: int, folder: Path, args: list[str]) -> int:
    """Forks a rank, in a session of its own; returns its process id."""
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
    log = os.open(folder / f"log.{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return 0


def main() -> None:
    """Imports torch once, which takes seconds, and forks groups of ranks as they are asked for.

    A line of JSON asks for a group; its answer has the exit codes of all ranks but the victim.
    """
    for line in sys.stdin:
        ask = json.loads(line)
        folder, ranks = Path(ask["folder"]), ask["ranks"]
        living = {}
        for rank in range(ranks):
            child = start(ask["mode"], rank, ranks, folder, ask["args"])
            if not child:
                be_rank(ask["mode"], rank, ranks, folder, ask["args"])
                return  # as a process ends that was not forked: with the interpreter
            living[rank] = child
        victim = living.pop(ask["victim"], None)
        limit, codes = time.monotonic() + 60.0, {}
        while living and time.monotonic() < limit:
            for rank, child in list(living.items()):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    del living[rank]
            time.sleep(0.02)
        for child in (*living.values(), *([victim] if victim else [])):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
