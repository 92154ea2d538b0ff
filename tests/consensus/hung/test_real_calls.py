"""The same with real calls: two ranks over TCP, real stores in their wrappers, one read that hangs.

The deadline wrapper has 16 worker threads. A call past its deadline opens the breaker, so that a
store that hangs costs one worker for each call that was in flight, and no more.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from l3store import page, registry
from l3store.config import StackOptions
from l3store.consensus.member import Member
from l3store.consensus.reports import Reports
from l3store.consensus.tcp import TcpLink
from l3store.consensus.values import Config, Grant, Release, Settle, Span, Storage, Topology
from l3store.errors import BackendTimeout, L3Error
from l3store.keys import Chain
from l3store.wrap.faulty import Faulty

PLACE, PAGE, PAGES = "hung-0/kv/all", 4096, 8
CONFIG = Config(
    Topology(2, tp=2), policy="wait_complete", deadline_s=0.5, heartbeat_s=0.1, peer_timeout_s=20
)
STACK = StackOptions(deadline=CONFIG.deadline_s, late="pending", breaker_failures=3)


class HangingReads(Faulty):
    """Hangs in reads only."""

    def batch_exists(self, keys):
        return self.inner.batch_exists(keys)

    def page_set(self, keys, pages):
        return self.inner.page_set(keys, pages)


class Ledger:
    def __init__(self, pages):
        self.free = pages

    def take(self, ticket, pages):
        self.free -= pages
        return True

    def settle(self, ticket, pages):
        self.free += pages  # no tree here

    def release(self, ticket, pages):
        self.free += pages


class Rank(threading.Thread):
    """One rank: its scheduler is this thread."""

    def __init__(self, link, store, chains):
        super().__init__(daemon=True)
        self.link, self.store, self.chains = link, store, chains
        self.ledger = Ledger(64)
        self.events, self.error, self.over = [], None, threading.Event()
        self.pool = ThreadPoolExecutor(8)

    def run(self):
        try:
            with self.pool, Member(Reports.join(self.link, CONFIG, 64), self.ledger) as member:
                self.member = member
                member.facts.ready()
                self._serve(member)
        except Exception as error:
            self.error = error

    def _serve(self, member):
        waiting, by_ticket = list(self.chains), {}
        while not self.over.is_set():
            for effect in member.step():
                self.events.append((member.machine.number, time.monotonic(), effect))
                if isinstance(effect, Grant):
                    keys = by_ticket[effect.ticket].keys(PLACE)[: effect.pages]
                    self.pool.submit(self._read, effect.ticket, keys)
                elif isinstance(effect, Storage) and not effect.on:
                    self.pool.submit(self._probe)
            if member.machine.storage_on and waiting:
                chain = waiting.pop(0)
                span = Span(f"r{len(waiting)}", 0, 0, len(chain), chain[-1][0])
                ticket = member.submit(span)
                by_ticket[ticket] = chain
                self.pool.submit(self._query, ticket, chain.keys(PLACE))
            time.sleep(0.002)

    def _query(self, ticket, keys):
        try:
            self.member.facts.hit(ticket, self.store.batch_exists(keys))
        except L3Error:
            self.member.facts.hit(ticket, 0)

    def _read(self, ticket, keys):
        facts = self.member.facts
        if not facts.enter(ticket):
            return
        into = page.frame([(memoryview(bytearray(PAGE)),) for _ in keys])
        try:
            done = self.store.page_get(keys, into)
            facts.progress(ticket, [*done, False].index(False))
        except L3Error as error:
            if isinstance(error, BackendTimeout) and error.pending is not None:
                facts.finish(ticket)
                facts.veto()  # the breaker is open while the call runs
                facts.late(len(keys))
                error.pending.exception()
                facts.late(-len(keys))
        finally:
            facts.finish(ticket)
            facts.leave(ticket)

    def _probe(self):
        """A rank whose path works is ready at once; the other one asks until it does."""
        while not self.over.is_set():
            try:
                self.store.batch_exists(self.chains[0].keys(PLACE))
                return self.member.facts.ready()
            except L3Error:
                time.sleep(0.02)

    def seen(self, kind):
        return [(number, at, effect) for number, at, effect in list(self.events)
                if isinstance(effect, kind)]  # fmt: skip


@pytest.fixture
def group():
    hang = HangingReads(registry.open("memory://?capacity=8MiB", raw=True), hang=0.03)
    hung, healthy = [], []
    while not hung or len(healthy) < 3:
        start = 1000 * (len(hung) + len(healthy))
        chain = Chain.from_tokens(range(start, start + PAGES * 16), 16)
        hangs = any(hang.meets("hang", key) for key in chain.keys(PLACE))
        (hung if hangs else healthy).append(chain)
    chains = [hung[0], *healthy[:3]]
    stores = [registry.open("memory://?capacity=8MiB"), registry.stack(hang, STACK, name="hang")]
    for store in stores:
        for chain in chains:
            data = [(memoryview(bytes(PAGE)),)] * PAGES
            assert all(store.page_set(chain.keys(PLACE), page.seal(PLACE, chain, data)))
    before = workers()  # of stores of other tests, which may hang there still
    leader = TcpLink.listen(CONFIG)
    ranks = [Rank(leader, stores[0], chains)]
    ranks[0].start()
    ranks.append(Rank(TcpLink.connect(leader.address, CONFIG, 1), stores[1], chains))
    ranks[1].start()
    yield ranks, hang, before
    hang.release()
    for rank in ranks:
        rank.over.set()
    for rank in ranks:
        rank.join(10)
    for store in stores:
        store.close()


def workers():
    """Threads of deadline wrappers."""
    return sum(thread.name.startswith("l3store-deadline") for thread in threading.enumerate())


def until(condition, seconds=15.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def settled(rank):
    return {effect.ticket: effect.pages for _, _, effect in rank.seen(Settle)}


def test_a_read_that_hangs_costs_its_own_ticket_and_nobody_waits_for_it(group):
    ranks, hang, before = group
    until(lambda: all(len(settled(rank)) == len(rank.chains) for rank in ranks))
    for rank in ranks:
        assert rank.error is None
        ticket_of_hung = 0
        assert settled(rank) == {0: 0, **{other: PAGES for other in range(1, len(rank.chains))}}
        moments = {effect.ticket: at for _, at, effect in rank.seen(Settle)}
        granted = {effect.ticket: at for _, at, effect in rank.seen(Grant)}
        assert moments[ticket_of_hung] - granted[ticket_of_hung] > 0.9 * CONFIG.deadline_s
        for other in range(1, len(rank.chains)):  # all of them ended while it hung
            assert moments[other] < moments[ticket_of_hung]
    assert hang.hanging == 1
    assert workers() - before <= 16

    # L3 goes off on both at one record, and the pages stay out on both.
    until(lambda: all(rank.seen(Storage)[-1][2] == Storage(False, 1) for rank in ranks))
    assert len({rank.seen(Storage)[-1][0] for rank in ranks}) == 1
    assert [rank.ledger.free for rank in ranks] == [64 - PAGES] * 2

    # They come back on both at one record when it has returned, and then L3 does.
    hang.release()
    until(lambda: all(rank.ledger.free == 64 for rank in ranks))
    released = [{number for number, _, effect in rank.seen(Release) if effect.ticket == 0}
                for rank in ranks]  # fmt: skip
    assert released[0] == released[1]
    assert len(released[0]) == 1
    until(lambda: all(rank.seen(Storage)[-1][2] == Storage(True, 2) for rank in ranks))
