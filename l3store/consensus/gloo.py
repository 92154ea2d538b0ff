"""A link over gloo process groups, for engines that have a store of torch and no port to spare.

One group and one thread for each purpose. gloo cannot wait for a while: a wait that ends in time
has killed its group. So every wait here is as long as `peer_timeout_s`, whoever has nothing to say
says so long before, and a wait that ends means that a rank is lost; which one, the store tells.
"""

from __future__ import annotations

import atexit
from collections import deque
from functools import partial
from struct import Struct
from threading import Condition, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar

from l3store.consensus.agreement import PeerLost
from l3store.consensus.beats import Beats, Left
from l3store.consensus.gloo_groups import Lane, connect, first_line, torch
from l3store.consensus.votes import PURPOSES
from l3store.errors import ConfigError, ConsensusError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from l3store.consensus.values import Config

__all__ = ["GROUPS", "GlooLink"]

GROUPS = ("share", "records", *PURPOSES)
"""A link's groups: no two threads may use one."""
RECORD_BYTES = 4096
"""Of one broadcast; a longer record takes several."""
_CHUNK = Struct("<L")
"""Length of the whole record; 0: there is none, only a sign of life."""
_GOODBYE = (1 << 32) - 1
"""Instead of a length: all records have come, and the leader has left."""
_LENGTH = Struct("<Q")
_LEAVE_S = 1.0
_GRACE_S = 0.5
"""Votes whose connection ends wait so long for records: these say whether the leader has left. And
what is shared has so long to come from a rank that has left right after it."""
_T = TypeVar("_T")


class GlooLink:
    """The ranks of one group over gloo; a `GatherLink`.

    Made by `create` from a store, or from groups that the engine has: all with the same ranks in
    the same order, none used for anything else.

    Args:
        groups: A gloo process group for each name of `GROUPS`.
        config: Equal on all ranks; names and times come from it.
        store: Through which ranks show that they are alive, with a prefix of this group; None: a
            lost rank is noticed all the same, but cannot be named.
        host: Rank whose process serves the store; None: another process does.

    Raises:
        ConfigError: A group is missing or unknown, or has another number of ranks.
    """

    def __init__(
        self,
        groups: Mapping[str, Any],
        config: Config,
        store: Any = None,
        host: int | None = 0,
    ) -> None:
        for name in groups:
            if name not in GROUPS:
                raise ConfigError(f"unknown group {name!r}{nearest(name, GROUPS)}")
        for name in GROUPS:
            if name not in groups:
                raise ConfigError(f"no group for {name}; a link needs {', '.join(GROUPS)}")
            if groups[name].size() != config.topology.ranks:
                raise ConfigError(
                    f"the group for {name} has {groups[name].size()} ranks and the topology "
                    f"{config.topology.ranks}"
                )
        self.rank, self.ranks, self.dropped = groups["share"].rank(), config.topology.ranks, 0
        self._lanes = {name: Lane(groups[name], config, self._check) for name in GROUPS}
        self._lanes["records"].check = self._check_records
        self._lanes["share"].check = self._check_share
        self._name = config.topology.name
        self._idle_s, self._silence_s = config.heartbeat_s, config.peer_timeout_s
        self._turn = Condition()
        self._failure: ConsensusError | None = None
        self._failed_at = 0.0
        self._closed = self._cut = False  # cut: what did not go out in time is lost
        self._over = True  # no record goes out, or comes
        self._busy = 0  # threads that are in gloo
        self._outbox: deque[bytes] = deque()
        self._inbox: deque[bytes] = deque()
        self._thread: Thread | None = None
        self._store, self._beats = store, None
        if store is not None:
            self._beats = Beats(store.clone(), config, self.rank, host, self._fail)

    @classmethod
    def create(
        cls,
        store: Any,
        config: Config,
        rank: int,
        *,
        name: str = "l3store",
        interface: str = "",
        host: int | None = 0,
        timeout_s: float = 60.0,
    ) -> Self:
        """Makes the groups; blocks until all ranks have called it.

        Args:
            store: `torch.distributed.TCPStore` or another one that all ranks reach.
            config: Equal on all ranks.
            rank: Of this process.
            name: Of the group: a new one for each group that is made from a store.
            interface: Name of the network interface; by default the one of the host's name.
            host: Rank whose process serves the store; None: another process does.
            timeout_s: For all ranks to be there.

        Raises:
            ConfigError: torch is not installed, two processes claim the rank, or ranks count the
                ranks differently.
            ConsensusError: A rank did not come.
        """
        config.topology.seat(rank)
        own = torch().distributed.PrefixStore(name, store.clone())
        groups = connect(own, config, rank, GROUPS, interface, timeout_s)
        link = cls(groups, config, own, host)
        link._store = store  # it may serve the others, until the last reference is gone
        return link

    def share(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Gives each rank's blob to all, by rank. All ranks call it, in the same order; blocks.

        Raises:
            ConsensusError: A rank did not come in time, or is lost.
        """
        lane = self._lanes["share"]
        if self._thread is None:
            self._begin()
        told = self._guarded("share", lambda: lane.gather(_LENGTH.pack(len(blob)), timeout_s))
        lengths = [_LENGTH.unpack(each)[0] for each in told]
        padded = blob.ljust(max(*lengths, 1), b"\0")
        blobs = self._guarded("share", lambda: lane.gather(padded, timeout_s))
        return [each[:length] for each, length in zip(blobs, lengths, strict=True)]

    def gather(self, purpose: str, frame: bytes) -> list[bytes]:
        """Gives each rank's frame to all, by rank; blocks until every rank has called.

        Raises:
            ConsensusError: A rank is lost, or the frames of a purpose are not of one length: gloo
                would abort the process.
        """
        lane = self._lanes[purpose]
        if not lane.length:
            lengths = self._guarded(purpose, lambda: lane.gather(_LENGTH.pack(len(frame))))
            self._alike(purpose, [_LENGTH.unpack(each)[0] for each in lengths])
            lane.length = len(frame)
        if len(frame) != lane.length:
            raise ConsensusError(
                f"{purpose}: a frame of {len(frame)} bytes; all have {lane.length}"
            )
        return self._guarded(purpose, lambda: lane.gather(frame))

    def publish(self, frame: bytes) -> None:
        """Leader: sends a record to all, reliably and in order. Does not wait for a receiver."""
        self._check()
        with self._turn:
            self._outbox.append(frame)
            self._turn.notify_all()

    def receive(self) -> bytes | None:
        """Follower: the next record, or None if it is not here yet. Does not block.

        Raises:
            PeerLost: A rank is lost, or has left and all records before have been received.
        """
        with self._turn:
            if not self._received():
                self._check()
            return self._inbox.popleft() if self._inbox else None

    def wait(self, timeout_s: float) -> None:
        """Blocks until a record may be here.

        Raises:
            PeerLost: A rank is lost.
        """
        with self._turn:
            self._turn.wait_for(lambda: bool(self._inbox or self._failure), timeout_s)
            if not self._received():
                self._check()

    def fail(self, error: PeerLost) -> None:
        """Ends the group for all ranks; the others see this one as one that has left."""
        self._fail(error)
        self.close()

    def close(self) -> None:
        """Leaves the group; the others are told so, and it ends for them. Idempotent.

        The leader's records go out before, then its goodbye; a follower helps to carry them until
        the leader leaves, too. Both wait a second at most, and not at all if the group has ended.
        """
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self.rank and self._beats is not None:
            self._beats.close()
        with self._turn:
            self._turn.wait_for(lambda: self._over or self._failure, _LEAVE_S)
            self._cut = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: not self._busy, _LEAVE_S)
        if self._beats is not None:
            self._beats.close()
        atexit.unregister(self.close)

    # -- inner

    def _begin(self) -> None:
        """Everyone is there, or will be: signs of life and records begin."""
        atexit.register(self.close)  # no thread is in gloo when the interpreter ends
        self._over = False
        self._thread = Thread(target=self._run, name="l3store-records", daemon=True)
        self._thread.start()
        if self._beats is not None:
            self._beats.start()

    def _run(self) -> None:
        try:
            if self.rank == 0:
                self._send()
            else:
                self._read()
        except ConsensusError:
            return  # who waits for a record is told
        finally:
            with self._turn:
                self._over = True
                self._turn.notify_all()

    def _send(self) -> None:
        lane, leaving = self._lanes["records"], False
        while not leaving:
            with self._turn:
                self._turn.wait_for(lambda: bool(self._outbox) or self._closed, self._idle_s)
                leaving = self._closed and not self._outbox
                record = self._outbox.popleft() if self._outbox else b""
            framed = _CHUNK.pack(_GOODBYE if leaving else len(record)) + record
            for at in range(0, len(framed), RECORD_BYTES):
                chunk = framed[at : at + RECORD_BYTES].ljust(RECORD_BYTES, b"\0")
                self._guarded("records", partial(lane.broadcast, chunk))

    def _read(self) -> None:
        lane = self._lanes["records"]
        nothing = bytes(RECORD_BYTES)
        while True:
            framed = self._guarded("records", lambda: lane.broadcast(nothing))
            (said,) = _CHUNK.unpack_from(framed)
            if said == _GOODBYE:
                self._fail(Left(f"{self._name(0)} has left the group", rank=0))
                return
            length = _CHUNK.size + said
            while len(framed) < length:
                framed += self._guarded("records", lambda: lane.broadcast(nothing))
            if said:
                with self._turn:
                    self._inbox.append(framed[_CHUNK.size : length])
                    self._turn.notify_all()

    def _guarded(self, purpose: str, call: Callable[[], _T]) -> _T:
        check = self._check_records if purpose == "records" else self._check
        with self._turn:
            check()
            self._busy += 1
        began = monotonic()
        try:
            return call()
        except RuntimeError as error:
            if self.rank and purpose != "records" and monotonic() - began < self._silence_s:
                with self._turn:
                    self._turn.wait_for(lambda: self._over, _GRACE_S)
            check()
            lost = self._beats.judge() if self._beats is not None else None
            unnamed = PeerLost(
                f"a rank is lost, and {self._name(self.rank)} cannot tell which: {purpose} with "
                f"the others failed: {first_line(error)}",
                rank=None,
            )
            self._fail(lost or unnamed)
            check()
            raise
        finally:
            with self._turn:
                self._busy -= 1
                self._turn.notify_all()

    def _alike(self, purpose: str, lengths: list[int]) -> None:
        others = [rank for rank, length in enumerate(lengths) if length != lengths[0]]
        if others:
            told = ", ".join(f"{lengths[rank]} on {self._name(rank)}" for rank in others)
            raise ConsensusError(
                f"{purpose}: frames have {lengths[0]} bytes on {self._name(0)}, {told}; they must "
                f"be equal"
            )

    def _fail(self, error: ConsensusError) -> None:
        with self._turn:
            if self._failure is None:
                self._failure, self._failed_at = error, monotonic()
            self._turn.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ConsensusError(f"{self._name(self.rank)} has closed its link")

    def _check_records(self) -> None:
        """As `_check`, but what is on its way may still go out, or come."""
        if self._failure is not None or self._cut:
            self._check()

    def _check_share(self) -> None:
        """As `_check`, but whoever has left may have given its blob before."""
        left = isinstance(self._failure, Left) and not self._closed
        if not left or monotonic() - self._failed_at > _GRACE_S:
            self._check()

    def _received(self) -> bool:
        """Whether a record is here that comes before whatever has ended the group."""
        return bool(self._inbox) and not self._closed and isinstance(self._failure, Left | None)
