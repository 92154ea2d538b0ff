"""What is measured: each way to a record as one rank drives it, and the ruler beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from struct import Struct
from time import monotonic, perf_counter, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

from quietly import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, PrefixStore, ReduceOp
from traffic import BATCH_PAGES, PAGES, Engine, Ledger

from l3store.consensus.collective import Collective
from l3store.consensus.gloo import GlooLink
from l3store.consensus.gloo_groups import connect
from l3store.consensus.member import Member
from l3store.consensus.reports import Reports
from l3store.consensus.tcp import TcpLink
from l3store.consensus.values import Config, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["CARRIED", "COLLECTIVE", "INTERVAL_S", "RULER", "SIDES", "WINDOW_1", "WINDOW_8",
           "Cost", "Side", "new_side"]  # fmt: skip

INTERVAL_S = 0.005
RULER, WINDOW_8, WINDOW_1 = "all-reduce", "reports, window 8", "reports, window 1"
COLLECTIVE, CARRIED = "collective", "carried by the engine"
SIDES = (RULER, WINDOW_8, WINDOW_1, COLLECTIVE, CARRIED)
_CARRIER_BYTES = 1 << 15
_LENGTH = Struct("<L")
_JOIN_S = 60.0
_FEW = 8
"""Numbers of the ruler beside two a ticket: applied, veto, ready and what engines agree on."""


class Cost(NamedTuple):
    """Of one step on the thread that steps, in seconds."""

    wall: float
    cpu: float


class Counter:
    """Counts what a rank gives to its link."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.closest = float("inf")
        """Shortest time between the starts of two reports."""
        self._last = float("-inf")

    def add(self, what: str, size: int) -> None:
        self.calls[what] = self.calls.get(what, 0) + 1
        self.bytes[what] = self.bytes.get(what, 0) + size
        if what == "report":
            now = monotonic()
            self.closest, self._last = min(self.closest, now - self._last), now

    def watch(self, link: Any) -> None:
        """Counts the reports, records and gathers of a link."""
        if hasattr(link, "gather"):
            gather = link.gather
            link.gather = lambda purpose, frame: (
                self.add(purpose, len(frame)), gather(purpose, frame),
            )[1]  # fmt: skip
        for name in ("report", "publish"):
            if hasattr(link, name):
                self._watch(link, name, getattr(link, name))

    def _watch(self, link: Any, name: str, call: Callable[[bytes], None]) -> None:
        def counted(frame: bytes) -> None:
            self.add(name, len(frame))
            call(frame)

        setattr(link, name, counted)


class Side(ABC):
    """One rank of one group.

    Attributes:
        engine: None for the ruler.
        counter: What went over its link.
    """

    engine: Engine | None = None

    def __init__(self) -> None:
        self.counter = Counter()

    @abstractmethod
    def step(self, tickets: int) -> tuple[Cost, list[Any]]:
        """Takes one step; returns its cost and its effects."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group."""


class Ruler(Side):
    """One MIN all-reduce a step, as engines do it: two numbers a ticket, and a few."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group
        self._options = AllreduceOptions()
        self._options.reduceOp = ReduceOp.MIN

    def step(self, tickets: int) -> tuple[Cost, list[Any]]:
        rank = self._group.rank()
        numbers = torch.arange(2 * tickets + _FEW, dtype=torch.int64) + rank
        (_, cost) = _timed(lambda: self._group.allreduce([numbers], self._options).wait())
        if int(numbers[-1]) != len(numbers) - 1:
            raise SystemExit(f"the MIN of an all-reduce is {numbers[-1]}")
        return cost, []

    def close(self) -> None:
        """The group goes with the process."""


class Agreed(Side):
    """A member that takes its records from the link."""

    def __init__(self, way: type[Reports | Collective], link: Any, config: Config) -> None:
        super().__init__()
        self.counter.watch(link)
        ledger = Ledger()
        self._member = Member(way.join(link, config, 1 << 20, _JOIN_S), ledger)
        self.engine = Engine(self._member, ledger, config, link.rank)

    def step(self, tickets: int) -> tuple[Cost, list[Any]]:
        effects, cost = _timed(self._member.step)
        return cost, effects

    def close(self) -> None:
        self._member.close()


class Carried(Agreed):
    """A member whose records go along with a broadcast of the engine, which is not timed."""

    def __init__(self, link: Any, config: Config, group: Any) -> None:
        super().__init__(Reports, link, config)
        self._group, self._leads = group, link.rank == 0

    def step(self, tickets: int) -> tuple[Cost, list[Any]]:
        record, decided = b"", Cost(0.0, 0.0)
        if self._leads:
            record, decided = _timed(self._member.decide)
        carried = self._broadcast(record)
        effects, accepted = _timed(lambda: self._member.accept(carried))
        return Cost(decided.wall + accepted.wall, decided.cpu + accepted.cpu), effects

    def _broadcast(self, record: bytes) -> bytes:
        buffer = bytearray((_LENGTH.pack(len(record)) + record).ljust(_CARRIER_BYTES, b"\0"))
        if len(buffer) > _CARRIER_BYTES:
            raise SystemExit(f"a record of {len(record)} bytes is too long for the carrier")
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([torch.frombuffer(buffer, dtype=torch.uint8)], options).wait()
        length = _LENGTH.unpack_from(buffer)[0]
        return bytes(buffer[_LENGTH.size : _LENGTH.size + length])


def new_side(kind: str, store: Any, rank: int, ranks: int) -> Side:
    """Joins a group of this kind; all ranks call it in the same order. Blocks."""
    window = 1 if kind == WINDOW_1 else 8
    config = Config(
        Topology(ranks, tp=ranks), policy="wait_complete", batch_pages=BATCH_PAGES,
        max_pages=PAGES, window=window, interval_s=INTERVAL_S,
    )  # fmt: skip
    own = PrefixStore(kind, store)
    if kind == RULER:
        return Ruler(_group(own, config, rank))
    if kind == COLLECTIVE:
        link = GlooLink.create(own, config, rank)
        return Agreed(Collective, link, config)
    if rank == 0:
        leader = TcpLink.listen(config)
        own.set("address", leader.address)
        tcp: Any = leader
    else:
        tcp = TcpLink.connect(own.get("address").decode(), config, rank)
    if kind == CARRIED:
        return Carried(tcp, config, _group(own, config, rank))
    return Agreed(Reports, tcp, config)


def _group(store: Any, config: Config, rank: int) -> Any:
    groups: Mapping[str, Any] = connect(store, config, rank, ("engine",), "", _JOIN_S)
    return groups["engine"]


def _timed(call: Callable[[], Any]) -> tuple[Any, Cost]:
    cpu, wall = thread_time(), perf_counter()
    found = call()
    wall = perf_counter() - wall
    return found, Cost(wall, thread_time() - cpu)
