"""Whole members over gathered votes, with real threads and links in one process."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from l3store.consensus.collective import Collective
from l3store.consensus.member import Member
from l3store.consensus.values import Config, Grant, Kind, Settle, Span, Topology
from l3store.errors import ConsensusError
from l3store.testing.simulation.host import Boundless


class Bus:
    """The wires of one group."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.records: list[deque[bytes]] = [deque() for _ in range(ranks)]
        purposes = ("share", "hits", "progress", "state")
        self.meet = {purpose: threading.Barrier(ranks) for purpose in purposes}
        self.frames: dict[str, list[bytes]] = {purpose: [b""] * ranks for purpose in purposes}


class Wire:
    """A rank's link; `tap` may change a frame that leaves."""

    dropped = 0

    def __init__(self, bus: Bus, rank: int) -> None:
        self.bus, self.rank, self.ranks = bus, rank, bus.ranks
        self.tap = lambda purpose, frame: frame

    def gather(self, purpose: str, frame: bytes) -> list[bytes]:
        meet, frames = self.bus.meet[purpose], self.bus.frames[purpose]
        frames[self.rank] = self.tap(purpose, frame)
        try:
            meet.wait(30)
            found = list(frames)
            meet.wait(30)
        except threading.BrokenBarrierError as error:
            raise ConsensusError("the wires are cut") from error
        return found

    def share(self, blob: bytes, timeout_s: float) -> list[bytes]:
        return self.gather("share", blob)

    def publish(self, frame: bytes) -> None:
        for queue in self.bus.records[1:]:
            queue.append(frame)

    def receive(self) -> bytes | None:
        queue = self.bus.records[self.rank]
        return queue.popleft() if queue else None

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, 0.001))

    def fail(self, error: ConsensusError) -> None:
        self.close()

    def close(self) -> None:
        for meet in self.bus.meet.values():
            meet.abort()


@pytest.fixture
def group():
    """Joins a member on each rank; all leave at the end."""
    joined: list[Member] = []

    def join(ranks: int, **fields: object) -> list[Member]:
        config = Config(Topology(ranks, tp=ranks), batch_pages=4, max_pages=32, **fields)
        bus = Bus(ranks)
        wires = [Wire(bus, rank) for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as pool:
            agreed = pool.map(lambda wire: Collective.join(wire, config, 100), wires)
            joined.extend(Member(each, Boundless()) for each in agreed)
        for member in joined:
            member.facts.ready()
        return joined

    yield join
    for member in joined:
        member.close()


def on_all(members: list[Member], play) -> list:
    """Plays the part of each rank in a thread of its own."""
    with ThreadPoolExecutor(len(members)) as pool:
        return [each.result(60) for each in [pool.submit(play, m) for m in members]]


def play(member: Member, steps: int) -> list:
    """An engine: equal inputs on every rank, and reads of its own pace."""
    inputs, own = random.Random(3), random.Random(member._agreement.rank)
    facts, machine, seen = member.facts, member.machine, []
    reading: dict[int, list[int]] = {}
    issued: dict[Kind, list[int]] = {kind: [] for kind in Kind}
    aborted: list = []

    def work() -> None:
        for effect in [*aborted, *member.step()]:
            seen.append((machine.number, effect))
            if isinstance(effect, Grant):
                assert facts.enter(effect.ticket)
                reading[effect.ticket] = [own.randint(0, effect.pages), 0]
            elif isinstance(effect, Settle) and effect.ticket in reading:
                reading[effect.ticket][0] = 0
        for kind, ops in issued.items():
            if ops and own.random() < 0.6:
                op = ops.pop(0 if kind.in_order else own.randrange(len(ops)))
                facts.ack(kind, op, ok=own.random() < 0.8)
        for ticket, (limit, read) in list(reading.items()):
            if read < limit:
                reading[ticket][1] = own.randint(read + 1, limit)
                facts.progress(ticket, reading[ticket][1])
            else:
                del reading[ticket]
                facts.finish(ticket)
                facts.leave(ticket)

    for _ in range(steps):
        work()
        aborted.clear()
        if inputs.random() < 0.4:
            pages = inputs.randint(1, 20)
            ticket = member.submit(Span(f"r{machine.number}", 0, 0, pages, b"tail"))
            if ticket is not None:
                facts.hit(ticket, own.randint(0, pages))
        if inputs.random() < 0.2:
            aborted += member.abort(f"r{machine.number - 1}")
        if inputs.random() < 0.3:
            kind = inputs.choice(list(Kind))
            issued[kind].append(member.issue(kind))
    work()
    aborted.clear()
    while machine.tickets or any(ops.ended.floor < ops.issued for ops in machine.ops):
        work()
    seen.append(machine.digests(1))
    return seen


@pytest.mark.parametrize(("ranks", "window"), [(2, 8), (3, 1)])
def test_every_rank_sees_the_same_effects_and_nothing_is_left(group, ranks, window):
    members = group(ranks, window=window)

    def steps(member: Member) -> list:
        seen = play(member, 200)
        # The others may be some records behind: stay until they are here, too.
        for _ in range(window + 1):
            member.step()
        return seen

    seen = on_all(members, steps)
    # The step in which all has ended is the same one: it comes from the same records.
    assert all(each == seen[0] for each in seen)
    reasons = {effect.reason for _, effect in seen[0][:-1] if isinstance(effect, Settle)}
    assert {"complete", "short", "aborted"} <= reasons
    assert not any(member.facts._left or member.facts._tickets for member in members)


def test_spans_that_differ_are_one_error_at_the_next_step_of_every_rank(group):
    members = group(2)

    def steps(member: Member) -> str:
        while not member.machine.storage_on:
            member.step()
        rank = member._agreement.rank
        ticket = member.submit(Span("r", 0, 5 - 2 * rank, 10 + 2 * rank, b"tail"))
        member.facts.hit(ticket, 1)
        while member._agreement._failure is None:  # votes need no step
            time.sleep(0.001)
        agreement, machine = member._agreement, member.machine
        found = []
        for call, given in (
            (agreement.step, machine), (agreement.poll, machine), (agreement.accept, b""),
            *([(agreement.decide, machine)] if rank == 0 else []),
        ):  # fmt: skip
            with pytest.raises(ConsensusError) as raised:
                call(given)
            found.append(raised.value)
        assert len(set(map(id, found))) == 1
        return str(found[0])

    said = on_all(members, steps)
    assert said[0] == said[1]
    assert "rank 1 (pp 0, cp 0, tp 1) has another span than rank 0" in said[0]


def test_a_rank_that_waits_for_a_record_hears_of_a_vote_that_slips(group):
    members = group(2)
    wire = members[1]._agreement._link
    # Rank 1 says that its vote is the one after: the tag's ticket is 8 bytes from the third on.
    wire.tap = lambda purpose, frame: (
        frame[:2] + b"\1" + frame[3:] if purpose == "hits" and frame[1] else frame
    )

    def steps(member: Member) -> str:
        def go_on() -> None:
            while True:
                member.step()
                if member.machine.storage_on and not member.machine.next_ticket:
                    member.facts.hit(member.submit(Span("r", 0, 0, 3, b"tail")), 3)

        with pytest.raises(ConsensusError) as raised:
            go_on()
        return str(raised.value)

    for said in on_all(members, steps):
        assert "the votes on hits do not pair" in said
        assert "rank 0 (pp 0, cp 0, tp 0) votes on ticket 0" in said
        assert "rank 1 (pp 0, cp 0, tp 1) on ticket 1" in said


def test_records_can_be_carried_by_the_engine(group):
    leader, other = group(2)
    effects: list[list] = []
    limit = time.monotonic() + 30
    while not effects and time.monotonic() < limit:
        data = leader.decide()
        both = [leader.accept(data), other.accept(data)]
        assert both[0] == both[1]
        effects += [both[0]] if both[0] else []
        time.sleep(0.002)
    assert effects
    assert not other._agreement._link.bus.records[1]


def test_a_link_that_breaks_in_another_way_stops_the_step_as_well(group):
    members = group(2)

    def broken(purpose: str, frame: bytes) -> bytes:
        raise OSError("no such wire")

    def go_on() -> None:
        while True:
            members[1].step()

    members[1]._agreement._link.tap = broken
    with pytest.raises(ConsensusError, match=r"votes on .* have stopped: OSError\('no such wire'"):
        go_on()
