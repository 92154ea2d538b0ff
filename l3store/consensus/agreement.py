"""What both ways to a record have in common: joining a group, and the interface of a step."""

from __future__ import annotations

import json
import logging
import secrets
from abc import ABC, abstractmethod
from struct import Struct
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from l3store.consensus.meeting import Meeting
from l3store.consensus.table import FactTable
from l3store.consensus.wire import VERSION, decode_record, encode_record
from l3store.errors import ConfigError, ConsensusError, L3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.consensus.protocol import Machine
    from l3store.consensus.values import Config, Record

__all__ = ["Agreement", "Link", "PeerLost", "compare"]

_log = logging.getLogger(__name__)
_NAMED = 8
"""Open tickets that a message lists."""
_GROUP = Struct("<Q")
"""The incarnation, in front of a record that the engine carries: no cookie guards that one."""


class PeerLost(ConsensusError):
    """A rank is gone: it died, fell silent, or left; the group cannot go on.

    Attributes:
        rank: The one that is gone; None: it cannot be told.
    """

    def __init__(self, message: str, *, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class Link(Protocol):
    """Carries bytes between the ranks of one group; knows nothing of their meaning.

    Frames of one link arrive whole. A lost peer is a `PeerLost` that names its rank, from
    `wait` and `share` on every other rank, at most `peer_timeout_s` after its last sign of life:
    a thread of the link gives and watches these signs.

    Attributes:
        rank: Of this process; 0 leads.
        ranks: In the group.
        dropped: Frames that were not of this group: wrong cookie, length or version.
    """

    rank: int
    ranks: int
    dropped: int

    def share(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Gives each rank's blob to all, by rank. All ranks call it, in the same order; blocks."""
        ...

    def publish(self, frame: bytes) -> None:
        """Leader: sends a record to all, reliably and in order. Does not wait for a receiver."""
        ...

    def receive(self) -> bytes | None:
        """Follower: the next record, or None if it is not here yet. Does not block."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Blocks until something new may be here (follower: a record; leader: a report)."""
        ...

    def fail(self, error: PeerLost) -> None:
        """Ends the group for all ranks: this one cannot go on, though it still gives signs of life.

        From any thread. The others are told why where the link can, or see this rank as lost.
        """
        ...

    def close(self) -> None:
        """Ends this rank's membership; peers that still wait see it as lost. Idempotent."""
        ...


class Agreement(ABC):
    """One rank's way to the records of its group: the same record for every rank.

    Made by `join`. `poll`, `step`, `decide` and `accept` belong to the one thread that steps; the
    facts may be written by any.

    Attributes:
        facts: What this rank has reached.
        capacity_pages: Host pages that every rank has: the MIN of what they said.
        dropped: Reports that were no facts of this group, or older than what was heard before.
    """

    _table: ClassVar[type[FactTable]] = FactTable
    _carries: ClassVar[tuple[str, ...]] = ()
    """Methods of its link beside those of `Link`."""

    def __init__(
        self,
        link: Link,
        config: Config,
        incarnation: int,
        capacity_pages: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.config, self.rank = config, link.rank
        self.capacity_pages = capacity_pages
        self.facts = self._table(config, link.rank, incarnation)
        self.dropped = 0
        self._link, self._incarnation, self._clock = link, incarnation, clock
        self._meeting = Meeting(config, incarnation) if link.rank == 0 else None
        self._made: Record | None = None

    @classmethod
    def join(cls, link: Link, config: Config, capacity_pages: int, timeout_s: float = 60.0) -> Self:
        """Meets the other ranks, compares what must be equal, and begins to exchange facts.

        All ranks call it at their start; blocks until all are there.

        Args:
            link: To the other ranks; closed if joining fails.
            config: Equal on all ranks.
            capacity_pages: Host pages of this rank; the group uses the MIN.
            timeout_s: For all ranks to be there.

        Raises:
            ConfigError: A field differs between ranks; it names the field, both values and ranks,
                and comes on every rank. Or the link is not for this way to a record.
            ConsensusError: A rank did not come, or is lost.
        """
        topology = config.topology
        # What is no number is told, too: then every rank says why there is no group.
        capacity = capacity_pages if type(capacity_pages) is int else repr(capacity_pages)
        hello = {
            "protocol": cls.__name__.lower(), "wire": VERSION, "capacity_pages": capacity,
            "incarnation": secrets.randbits(63), **config.plain(),
        }  # fmt: skip
        try:
            for name in cls._carries:
                if not hasattr(link, name):
                    raise ConfigError(
                        f"{cls.__name__} needs a link with `{name}`, and {type(link).__name__} has "
                        f"none: Reports goes over TcpLink, Collective over GlooLink"
                    )
            if link.ranks != topology.ranks:
                raise ConfigError(
                    f"the link has {link.ranks} ranks and the topology {topology.ranks} "
                    f"(pp {topology.pp} x cp {topology.cp} x tp {topology.tp})"
                )
            blobs = link.share(json.dumps(hello).encode(), timeout_s)
            hellos = [_hello(blob, topology.name(rank)) for rank, blob in enumerate(blobs)]
            compare(hellos, config)
            least, rank = min((said["capacity_pages"], at) for at, said in enumerate(hellos))
            if least < 1:
                raise ConfigError(
                    f"capacity_pages={least}: {topology.name(rank)} has no host pages"
                )
            joined = cls(link, config, hellos[0]["incarnation"], least)
            joined._start()
        except BaseException:
            link.close()
            raise
        return joined

    def share(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Gives each rank's blob to all, by rank: at start, for samples and the like; blocks."""
        return self._link.share(blob, timeout_s)

    def step(self, machine: Machine) -> Record:
        """Returns the next record; blocks until it is here.

        The leader waits only for a rank that is more than `Config.window` records behind. It is no
        error that a rank which gives signs of life does not step, and the wait has no end: each
        `Config.peer_timeout_s` of it a warning in the log says for whom.

        Raises:
            ConsensusError: A rank is lost, or ranks differ.
        """
        since, warned = self._clock(), 0
        try:
            while (record := self._poll(machine)) is None:
                self._wait(self.config.heartbeat_s)
                waited = self._clock() - since
                if waited >= (warned + 1) * self.config.peer_timeout_s:
                    warned += 1
                    _log.warning("%s", self._waits(machine, waited))
        except PeerLost as error:
            raise self._located(error, machine) from error
        return record

    def poll(self, machine: Machine) -> Record | None:
        """Returns the next record, or None if it is not here, or would be too far ahead."""
        try:
            return self._poll(machine)
        except PeerLost as error:
            raise self._located(error, machine) from error

    def _poll(self, machine: Machine) -> Record | None:
        if self._meeting:
            self._hear(self._meeting)
            if self._meeting.applied() <= machine.number - self.config.window:
                return None
            record = self._make(self._meeting, machine)
            self._link.publish(encode_record(record))
            self.facts.check(record)
            return record
        data = self._link.receive()
        return None if data is None else self._read(data)

    def _make(self, meeting: Meeting, machine: Machine) -> Record:
        """Returns the next record: until it is applied the same, as its news is in no other."""
        if self._made is None or self._made.number != machine.number + 1:
            self._made = self._next(meeting, machine)
        return self._made

    def _next(self, meeting: Meeting, machine: Machine) -> Record:
        """Returns a new record, from all that was heard."""
        return meeting.decide(machine, self._clock())

    def decide(self, machine: Machine) -> bytes:
        """Leader: makes the next record, for an engine that gives it to all ranks itself.

        Every rank, the leader too, then calls `accept` with it; until then it stays the same one.
        Does not block.

        Raises:
            ConsensusError: This rank does not lead, or ranks differ.
        """
        if self._meeting is None:
            raise ConsensusError(f"rank {self.rank} does not lead: rank 0 decides")
        try:
            self._hear(self._meeting)
        except PeerLost as error:
            raise self._located(error, machine) from error
        record = encode_record(self._make(self._meeting, machine))
        return _GROUP.pack(self._incarnation) + record

    def accept(self, data: bytes) -> Record:
        """Takes a record that was carried by the engine: what `decide` returned on the leader.

        Raises:
            ConsensusError: It is no record of this version or group, or claims more than this rank
                has.
        """
        if len(data) >= _GROUP.size:
            (incarnation,) = _GROUP.unpack_from(data)
            if incarnation != self._incarnation:
                raise ConsensusError("a record is of another group, or was changed on its way")
        return self._read(data[_GROUP.size :])

    def fail(self, error: Exception) -> None:
        """Ends the group for all ranks, who are told that this one cannot go on, and why.

        Without it they would wait: a rank that stands still gives signs of life. From any thread.
        """
        if isinstance(error, PeerLost):
            return  # the link has found it, on all ranks
        why = str(error) if isinstance(error, L3Error) else repr(error)
        text = f"{self.config.topology.name(self.rank)} cannot go on: {why}"
        self._link.fail(PeerLost(text, rank=self.rank))

    def _read(self, data: bytes) -> Record:
        try:
            record = decode_record(data)
        except ValueError as error:
            raise ConsensusError(f"a record cannot be read: {error}") from error
        self.facts.check(record)
        return record

    def close(self) -> None:
        """Leaves the group; idempotent."""
        self._link.close()

    def _located(self, error: PeerLost, machine: Machine) -> PeerLost:
        """Adds where the group was."""
        text = f"{error}; in step {machine.number + 1}"
        if self._meeting and error.rank is not None:
            last = self._meeting.reached(error.rank)
            text += f", and it is known to have applied record {last}"
        names = [f"{number}" for number in machine.tickets]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            text += f"; tickets open: {', '.join(names[:_NAMED])}{more}"
        return PeerLost(text, rank=error.rank)

    def _waits(self, machine: Machine, waited: float) -> str:
        """Returns for whom a step waits."""
        name, number = self.config.topology.name, machine.number
        if self._meeting is None:
            whom = f"record {number + 1} of {name(0)}"
        else:
            said = map(self._meeting.reached, range(self.config.topology.ranks))
            behind = [
                f"{name(rank)}, which has applied record {last}"
                for rank, last in enumerate(said)
                if last <= number - self.config.window
            ]
            more = f" and {len(behind) - _NAMED} more" if len(behind) > _NAMED else ""
            whom = f"{'; '.join(behind[:_NAMED])}{more}"
        return (
            f"step {number + 1} of {name(self.rank)} has waited {waited:.0f} s for {whom}; no "
            f"rank is lost, and one stands still"
        )

    def _wait(self, timeout_s: float) -> None:
        """Blocks until something new may be here."""
        self._link.wait(timeout_s)

    @abstractmethod
    def _start(self) -> None:
        """Starts the threads that exchange facts."""

    @abstractmethod
    def _hear(self, meeting: Meeting) -> None:
        """Leader: gives the meeting all facts that are new."""


_OWN = {"capacity_pages", "incarnation"}
"""Fields of a hello that may differ."""


def _hello(blob: bytes, name: str) -> dict[str, Any]:
    try:
        hello = json.loads(blob)
    except ValueError as error:
        raise ConsensusError(f"{name} said no hello that can be read: {error}") from error
    if not isinstance(hello, dict) or type(hello.get("incarnation")) is not int:
        raise ConsensusError(f"{name} said no hello: {hello!r}")
    pages = hello.get("capacity_pages")
    if type(pages) is not int:
        raise ConfigError(f"capacity_pages={pages} of {name} is not a number of pages")
    return hello


def compare(hellos: Sequence[dict[str, Any]], config: Config) -> None:
    """Compares what the ranks said at their start, by rank.

    Raises:
        ConfigError: A field differs; it names the field, both values and both ranks.
    """
    name = config.topology.name
    for rank, hello in enumerate(hellos):
        for field in sorted({*hellos[0], *hello} - _OWN):
            ours, theirs = hellos[0].get(field), hello.get(field)
            if ours != theirs:
                raise ConfigError(
                    f"{field} differs: {ours!r} on {name(0)}, {theirs!r} on {name(rank)}; it must "
                    f"be equal on all ranks"
                )
