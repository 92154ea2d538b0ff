"""The values that ranks exchange and decide on: spans, facts, bounds, records, effects. No rules.

Plain data of the standard library, the same on every rank. `protocol` has the rules, `wire` the
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from l3store.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ALL_ENDS",
    "NO_ACKS",
    "POLICIES",
    "SIDECARS",
    "UNLIMITED",
    "Acks",
    "Bounds",
    "Config",
    "Consume",
    "Effect",
    "Facts",
    "Grant",
    "Kind",
    "OpFacts",
    "OpId",
    "Record",
    "Release",
    "Row",
    "Seat",
    "Settle",
    "Span",
    "Storage",
    "TicketId",
    "Topology",
]

TicketId: TypeAlias = int
"""Dense, from 0, in the order of `Machine.submit`; never used again."""
OpId: TypeAlias = int
"""Dense, from 0, for each kind in the order of `Machine.issue`; never used again."""

UNLIMITED = 0xFFFFFFFF
"""The upper bound of a number that no rank has given yet."""
ALL_ENDS = -1
"""Every end point is legal: the bits of a set of end points, all of them set."""
POLICIES = ("best_effort", "timeout", "wait_complete")
SIDECARS = ("all_pages", "block_groups", "trailing_pages")


class Kind(IntEnum):
    """A kind of operation; each kind is numbered for itself."""

    WRITE_THROUGH = 0
    LOAD_BACK = 1
    BACKUP = 2

    @property
    def in_order(self) -> bool:
        """Whether it ends in the order of issue: device streams do, storage calls do not."""
        return self is not Kind.BACKUP


class Seat(NamedTuple):
    """The coordinate of a rank in its group. A DP replica is a group of its own."""

    pp: int
    cp: int
    tp: int

    def __str__(self) -> str:
        return f"pp {self.pp}, cp {self.cp}, tp {self.tp}"


@dataclass(frozen=True, slots=True)
class Topology:
    """The sizes of one group: `ranks` = pp x cp x tp.

    Raises:
        ConfigError: A size below 1, or sizes that do not multiply to `ranks`.
    """

    ranks: int
    pp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "pp", "cp", "tp"):
            size = getattr(self, name)
            if not _whole(size, 1):
                raise ConfigError(f"{name}={size!r} is not a number of ranks; it is 1 or more")
        product = self.pp * self.cp * self.tp
        if product != self.ranks:
            raise ConfigError(
                f"pp {self.pp} x cp {self.cp} x tp {self.tp} is {product} ranks, and the group has "
                f"{self.ranks}; a DP replica is a group of its own"
            )

    def seat(self, rank: int) -> Seat:
        """Returns the coordinate of a rank: tp runs fastest, then cp, then pp; rank 0 leads.

        Raises:
            ConfigError: The group has no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ConfigError(
                f"rank {rank} is not in a group of {self.ranks}: 0 to {self.ranks - 1}"
            )
        rest, tp = divmod(rank, self.tp)
        pp, cp = divmod(rest, self.cp)
        return Seat(pp, cp, tp)

    def name(self, rank: int) -> str:
        """Returns how messages call a rank: ``rank 3 (pp 1, cp 0, tp 1)``."""
        return f"rank {rank} ({self.seat(rank)})"


@dataclass(frozen=True, slots=True)
class Config:
    """What must be equal on all ranks of a group; compared field by field when they join.

    Raises:
        ConfigError: An unknown policy, or a value that makes no sense; the message names it.
    """

    topology: Topology
    schema: str = "1"
    """Whatever else of the engine must be equal, as text: model, page size, layout."""
    policy: str = "best_effort"
    """When a prefetch is cut short. `best_effort`: when the scheduler wants to run the request.
    `wait_complete`: never. `timeout`: at `timeout_s` plus `timeout_page_s` a page."""
    threshold_pages: int = 1
    """A hit below it is not worth a download."""
    occupancy_pages: int = 1 << 31
    """At most so many pages in open tickets."""
    max_pages: int = 4096
    """The longest span of a ticket."""
    max_late_pages: int = 1024
    """A rank vetoes the epoch when more pages are under calls past their deadline; its I/O threads
    count them, with `FactTable.late`."""
    batch_pages: int = 128
    """Pages of one storage call of a prefetch, by the engine; `collective` votes once for each."""
    deadline_s: float = 2.0
    """Of one storage call; past it the call has ended for the protocol. The engine holds to it: it
    gives it to its store and says `FactTable.finish`, as the core knows of no calls' time."""
    timeout_s: float = 1.0
    timeout_page_s: float = 0.0
    window: int = 8
    """Records that the leader may be ahead of the slowest rank: stages + pipeline depth."""
    interval_s: float = 0.005
    """At most one report of a rank in it."""
    heartbeat_s: float = 0.25
    """A report goes out again after it, in case the last one was lost; so does a sign of life."""
    peer_timeout_s: float = 30.0
    """A rank that is silent for so long is lost. Keep it below the engine's own watchdog."""

    def __post_init__(self) -> None:
        if not isinstance(self.topology, Topology):
            raise ConfigError(f"topology={self.topology!r}: it is a Topology")
        for name in ("schema", "policy"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r}: it is a text")
        if self.policy not in POLICIES:
            raise ConfigError(f"unknown policy {self.policy!r}{nearest(self.policy, POLICIES)}")
        for name, (least, most) in _COUNTS.items():
            value = getattr(self, name)
            if not _whole(value, least) or value > most:
                raise ConfigError(f"{name}={value!r}: it is a whole number from {least} to {most}")
        for name, shortest in _SECONDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{name}={value!r}: it is a number of seconds")
            if not shortest <= value <= _LONGEST:
                raise ConfigError(f"{name}={value!r}: it is from {shortest:g} to {_LONGEST:g} s")
        for name in ("max_pages", "occupancy_pages"):
            if self.threshold_pages > getattr(self, name):
                raise ConfigError(
                    f"threshold_pages={self.threshold_pages} is above {name}="
                    f"{getattr(self, name)}: no ticket could open"
                )
        if self.interval_s > self.heartbeat_s:
            raise ConfigError(
                f"interval_s={self.interval_s:g} is longer than heartbeat_s={self.heartbeat_s:g}"
            )
        if self.heartbeat_s * 3 > self.peer_timeout_s:
            raise ConfigError(
                f"heartbeat_s={self.heartbeat_s:g} leaves no room for a lost one in "
                f"peer_timeout_s={self.peer_timeout_s:g}: it is at most a third of it"
            )

    def plain(self) -> dict[str, object]:
        """Returns all fields, the topology's among them, by name: what ranks compare."""
        found: dict[str, object] = {
            name: getattr(self.topology, name) for name in ("ranks", "pp", "cp", "tp")
        }
        for each in fields(self):
            if each.name != "topology":
                found[each.name] = getattr(self, each.name)
        return found


_COUNTS = {
    "threshold_pages": (1, UNLIMITED - 1), "occupancy_pages": (1, 1 << 62),
    "max_pages": (1, UNLIMITED - 1), "max_late_pages": (1, 1 << 62),
    "batch_pages": (1, UNLIMITED - 1), "window": (1, 4096),
}  # fmt: skip
_SECONDS = {
    "deadline_s": 0.001, "timeout_s": 0.0, "timeout_page_s": 0.0, "interval_s": 0.005,
    "heartbeat_s": 0.005, "peer_timeout_s": 0.05,
}  # fmt: skip
_LONGEST = 1e6


def _whole(value: object, least: int) -> bool:
    """Whether it is a whole number from `least`: True, 1.0 and numpy's numbers are not."""
    return type(value) is int and value >= least


@dataclass(frozen=True, slots=True)
class Span:
    """What all ranks must agree to be fetching: pages `start` to `start + pages` of one chain.

    Attributes:
        rid: The request.
        attempt: Goes up each time the engine queues the request again.
        start: Pages of the prefix that are in a faster tier already.
        pages: Pages that are asked for, at least 1.
        tail_hash: Page hash of the last of them.
        sidecars: (pool, rule) of each pool beside kv, rules as in `SIDECARS`; in any order.

    Raises:
        ConfigError: A value that makes no sense or an unknown rule; the message names it.
    """

    rid: str
    attempt: int
    start: int
    pages: int
    tail_hash: bytes
    sidecars: tuple[tuple[str, str], ...] = ()
    digest: int = field(init=False, compare=False, repr=False)
    """64 bits over all fields; what ranks compare."""
    trailing: bool = field(init=False, compare=False, repr=False)
    """Whether a sidecar limits the end points: then all of a grant settles, or nothing."""

    def __post_init__(self) -> None:
        if not isinstance(self.rid, str) or not isinstance(self.tail_hash, bytes):
            raise ConfigError(
                f"request {self.rid!r}, tail hash {self.tail_hash!r}: they are text and bytes"
            )
        for name, least in (("attempt", 0), ("start", 0), ("pages", 1)):
            value = getattr(self, name)
            if not _whole(value, least):
                raise ConfigError(
                    f"{name}={value!r} of request {self.rid!r}: it is {least} or more"
                )
        for pool, rule in self.sidecars:
            if rule not in SIDECARS:
                raise ConfigError(
                    f"unknown rule {rule!r} of pool {pool!r}{nearest(rule, SIDECARS)}"
                )
        if len(dict(self.sidecars)) < len(self.sidecars):
            raise ConfigError(f"sidecars={self.sidecars!r}: a pool has one rule")
        texts = (self.rid, *(text for pair in sorted(self.sidecars) for text in pair))
        # A request id comes from outside, and JSON can say half a surrogate pair.
        parts = [text.encode(errors="surrogatepass") for text in texts]
        parts += [b"%d" % number for number in (self.attempt, self.start, self.pages)]
        framed = b"".join(b"%d:%b" % (len(part), part) for part in (*parts, self.tail_hash))
        number = int.from_bytes(blake2b(framed, digest_size=8).digest(), "little")
        object.__setattr__(self, "digest", number)
        object.__setattr__(self, "trailing", any(r == "trailing_pages" for _, r in self.sidecars))

    @property
    def label(self) -> tuple[str, int]:
        """(rid, attempt): what a ticket is called; its identity is its number."""
        return self.rid, self.attempt


class Row(NamedTuple):
    """What one rank has reached for one ticket. Every field only grows."""

    ticket: TicketId
    span: int
    """Digest of the span."""
    hit: int = UNLIMITED
    """Pages stored for this rank from `Span.start`, all_pages pools included. Written once, by the
    end of the query's deadline; `UNLIMITED`: not known yet."""
    done: int = 0
    """Contiguous pages from the start that were read and verified, and no call is in them."""
    groups: int = 0
    """Whole groups of block_groups pools that were read; it limits nothing."""
    final: bool = False
    """`done` will not grow."""
    quiet: bool = False
    """This rank has applied the settlement, and no call is in any page of the ticket or ever
    will be."""


OpFacts: TypeAlias = "tuple[tuple[tuple[OpId, frozenset[OpId]], ...], tuple[frozenset[OpId], ...]]"
"""`Facts.acked` and `Facts.failed`."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that one rank has reached: what a report carries."""

    incarnation: int
    """Of the group; frames of another one are not of this group."""
    rank: int
    seq: int
    """The higher one is the newer one."""
    applied: int
    """Number of the last record that this rank has applied."""
    digests: tuple[int, ...] = ()
    """Digest of the rank's state after record `applied`, and after the ones before it."""
    rows: frozenset[Row] = frozenset()
    ends: Mapping[TicketId, int] = field(default_factory=dict)
    """Of tickets with trailing_pages pools: bit `n` says that `n` pages are a legal end."""
    acked: tuple[tuple[OpId, frozenset[OpId]], ...] = ((0, frozenset()),) * len(Kind)
    """For each kind: all operations below the floor have ended, and these at or above it."""
    failed: tuple[frozenset[OpId], ...] = (frozenset(),) * len(Kind)
    """For each kind: those of the ended ones that did not succeed."""
    veto: int = 0
    """The highest epoch that this rank has found unusable."""
    ready: int = 0
    """The highest epoch that this rank can begin."""


class Bounds(NamedTuple):
    """What all ranks together have reached for one ticket.

    `low` counts an unknown number as 0 and may be used at any time; `high` counts it as unlimited
    and may be judged at any time; a number is agreed when both are equal.
    """

    hit_low: int = 0
    hit_high: int = UNLIMITED
    done_low: int = 0
    done_high: int = UNLIMITED
    groups: int = 0
    quiet: bool = False
    ends: int = ALL_ENDS
    """End points that are legal on every rank that has answered."""


class Acks(NamedTuple):
    """Operations of one kind that have ended on every rank, in the order of their numbers."""

    ended: tuple[OpId, ...] = ()
    failed: frozenset[OpId] = frozenset()
    """Those of them that failed on at least one rank."""


NO_ACKS = (Acks(),) * len(Kind)
"""Nothing has ended, of any kind."""


@dataclass(frozen=True, slots=True)
class Record:
    """What the leader says once and every rank applies at the same input boundary."""

    number: int
    now: float
    """Seconds of the leader's monotonic clock: only differences mean something."""
    epoch: int
    storage_on: bool
    rows: Mapping[TicketId, Bounds] = field(default_factory=dict)
    """Only those that have changed since the record before."""
    acks: tuple[Acks, ...] = NO_ACKS
    """For each kind."""


# -- what a rank does, physically, because all have decided it ------------------------------------


class Grant(NamedTuple):
    """The pages are reserved; begin to read the first `pages` pages of the ticket."""

    ticket: TicketId
    pages: int


class Settle(NamedTuple):
    """The ticket is decided: `pages` pages belong to the prefix tree; start no further call."""

    ticket: TicketId
    pages: int
    granted: int
    """Pages that were reserved: the ones behind `pages` stay reserved until `Release`."""
    reason: str
    """complete, short (below the threshold), full (no room), off (the epoch ended), timeout,
    wanted (best effort), or aborted."""
    groups: int = 0


class Release(NamedTuple):
    """No rank has a call in the ticket's pages any more: the last `pages` of them are free."""

    ticket: TicketId
    pages: int


class Consume(NamedTuple):
    """The operation has ended on every rank, with success on all of them or not."""

    kind: Kind
    op: OpId
    ok: bool


class Storage(NamedTuple):
    """L3 is on for a new epoch, or off: whoever can begin the next epoch reports ready."""

    on: bool
    epoch: int


Effect: TypeAlias = Grant | Settle | Release | Consume | Storage
