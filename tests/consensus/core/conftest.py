"""A ledger that counts, a machine with its records, and a group of ranks in steps by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from l3store.consensus.meeting import Meeting, meet
from l3store.consensus.member import Member
from l3store.consensus.protocol import Machine
from l3store.consensus.reports import Reports
from l3store.consensus.table import FactTable
from l3store.consensus.values import Acks, Config, Grant, Kind, Record, Row, Span, Topology
from l3store.consensus.wire import decode_facts, encode_facts


class Pages:
    """Host pages: each one is free, reserved by a ticket, or the tree's; it never comes twice."""

    def __init__(self, capacity=1 << 40):
        self.free, self.tree, self.reserved = capacity, 0, {}

    def take(self, ticket, pages):
        assert ticket not in self.reserved
        assert pages > 0
        if pages > self.free:
            return False
        self.free -= pages
        self.reserved[ticket] = pages
        return True

    def settle(self, ticket, pages):
        assert 0 <= pages <= self.reserved[ticket]
        self.reserved[ticket] -= pages
        self.tree += pages

    def release(self, ticket, pages):
        assert self.reserved.pop(ticket) == pages
        self.free += pages


def configured(ranks=2, **fields):
    return Config(Topology(ranks, tp=ranks), **fields)


def span(rid="r", attempt=0, start=0, pages=10, tail=b"x", sidecars=()):
    return Span(rid, attempt, start, pages, tail, sidecars)


def read(table, ticket, pages, groups=0):
    """A call has read so far, and is back."""
    assert table.enter(ticket)
    table.leave(ticket)
    table.progress(ticket, pages, groups)


class Driven:
    """One machine and the records it is given; `rows` are met from what each rank would say."""

    def __init__(self, capacity=1 << 40, *, on=True, ranks=2, **fields):
        self.ledger = Pages(capacity)
        self.machine = Machine(configured(ranks, **fields), self.ledger)
        self.now = 0.0
        if on:
            self.record(epoch=1, on=True)

    def record(self, rows=None, acks=None, *, wait=0.0, epoch=None, on=None, failed=()):
        machine = self.machine
        self.now += wait
        ended = [Acks()] * len(Kind)
        for kind, ops in (acks or {}).items():
            ended[kind] = Acks(tuple(ops), frozenset(failed))
        return machine.apply(
            Record(
                machine.number + 1,
                self.now,
                machine.epoch if epoch is None else epoch,
                machine.storage_on if on is None else on,
                rows or {},
                tuple(ended),
            )
        )

    def say(self, ticket, *ranks, ends=(), wait=0.0):
        """One record after each rank has said its part of a row; None: nothing yet."""
        rows = [None if said is None else Row(ticket, 0, **said) for said in ranks]
        return self.record({ticket: meet(rows, ends)}, wait=wait)

    def grant(self, pages=10, *hits, **fields):
        """A ticket that is being read, over as many pages as the lowest hit."""
        ticket = self.machine.submit(span(pages=pages, **fields))
        hits = hits or (pages,) * self.machine.config.topology.ranks
        self.said = self.say(ticket, *[{"hit": hit} for hit in hits])
        return ticket


class Talk:
    """A leader's meeting and machine, and the tables of all ranks; every report is heard."""

    incarnation = 7

    def __init__(self, ranks=2, **fields):
        self.config = configured(ranks, **fields)
        self.ranks = range(ranks)
        self.machine = Machine(self.config, Pages())
        self.meeting = Meeting(self.config, self.incarnation)
        self.tables = [FactTable(self.config, rank, self.incarnation) for rank in range(ranks)]
        self.on()

    def on(self):
        for table in self.tables:
            table.ready()
        self.step()

    def hear(self, *ranks):
        for rank in ranks or self.ranks:
            self.meeting.hear(decode_facts(encode_facts(self.tables[rank].facts())))

    def decide(self, *ranks):
        self.hear(*ranks)
        return self.meeting.decide(self.machine, 0.0)

    def apply(self, record):
        """The tables are told as a member tells them, but for settle and close."""
        effects = self.machine.apply(record)
        digests = self.machine.digests(self.config.window)
        for table in self.tables:
            for effect in effects:
                if isinstance(effect, Grant):
                    table.granted(effect.ticket, effect.pages)
            table.applied(record.number, digests, record.epoch, storage_on=self.machine.storage_on)
        return effects

    def step(self, *ranks):
        return self.apply(self.decide(*ranks))

    def submit(self, asked=None, *, on=None):
        asked = asked or span()
        ticket = self.machine.submit(asked)
        for table in self.tables if on is None else [self.tables[rank] for rank in on]:
            table.open(ticket, asked)
        return ticket


class Group:
    """Members over a link by hand: virtual time, a report and a record in each step."""

    def __init__(self, ranks=2, capacity=1 << 40, **fields):
        self.now = 0.0
        self.config = configured(ranks, **fields)
        self.sent = {}
        self.records = [deque() for _ in range(ranks)]
        self.ways = [
            Reports(_Link(self, rank), self.config, 7, capacity, lambda: self.now)
            for rank in range(ranks)
        ]
        self.ledgers = [Pages(capacity) for _ in range(ranks)]
        self.members = [
            Member(way, ledger) for way, ledger in zip(self.ways, self.ledgers, strict=True)
        ]
        self.facts = [member.facts for member in self.members]
        for table in self.facts:
            table.ready()
        self.step()

    def each(self, input_):
        """Gives every rank the same input; returns what all of them said to it."""
        said = [input_(member) for member in self.members]
        assert said.count(said[0]) == len(said)
        return said[0]

    def step(self, wait=0.01):
        self.now += wait
        for way in self.ways[1:]:
            way.pump()
        effects = [member.poll() for member in self.members]
        assert effects.count(effects[0]) == len(effects)
        digests = [member.machine.digests(1) for member in self.members]
        assert digests.count(digests[0]) == len(digests)
        return effects[0]

    def run(self, **wait):
        """Steps until nothing happens any more; returns all effects."""
        found = []
        for _ in range(20):
            effects = self.step(**wait)
            if not effects and found:
                break
            found += effects
        return found

    def submit(self, asked=None):
        return self.each(lambda member: member.submit(asked or span()))

    def free(self):
        frees = {ledger.free for ledger in self.ledgers}
        assert len(frees) == 1
        return frees.pop()


class _Link:
    dropped = 0

    def __init__(self, group, rank):
        self.group, self.rank, self.ranks = group, rank, group.config.topology.ranks
        self.closed, self.failed = False, None

    def report(self, frame):
        self.group.sent[self.rank] = frame

    def reports(self):
        sent, self.group.sent = self.group.sent, {}
        return sent

    def publish(self, frame):
        for queue in self.group.records[1:]:
            queue.append(frame)

    def receive(self):
        queue = self.group.records[self.rank]
        return queue.popleft() if queue else None

    def fail(self, error):
        self.failed = self.failed or error

    def close(self):
        self.closed = True


@pytest.fixture(scope="session")
def make():
    """All of the above by name: `make.driven()`, `make.group(ranks=4)`."""

    class Make:
        pages, driven, talk, group = Pages, Driven, Talk, Group
        config, span = staticmethod(configured), staticmethod(span)
        read = staticmethod(read)
        replace = staticmethod(replace)

    return Make
