"""Process groups of gloo, as far as a link needs them: made from a store, and moving bytes.

The only module here that touches torch; it imports it at the first use, which takes seconds.
"""

from __future__ import annotations

from ctypes import py_object, pythonapi
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from l3store.errors import ConfigError, ConsensusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from l3store.consensus.values import Config

__all__ = ["Lane", "connect", "first_line", "torch"]

_FIRST_S = 0.0001


def torch() -> Any:
    """Returns the package.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import torch.distributed
    except ImportError as error:
        raise ConfigError("a link over gloo needs torch: pip install 'l3store[engine]'") from error
    return torch


def first_line(error: RuntimeError) -> str:
    """Returns what gloo says, without its advice."""
    return str(error).splitlines()[0] if str(error) else repr(error)


def connect(
    store: Any, config: Config, rank: int, names: Iterable[str], interface: str, timeout_s: float
) -> dict[str, Any]:
    """Makes a group for each name; blocks until all ranks have called it.

    Raises:
        ConfigError: Two processes claim the rank, or ranks count the ranks differently.
        ConsensusError: A rank did not come.
    """
    _call_the_roll(store, config, rank, timeout_s)
    distributed = torch().distributed
    kind = distributed.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    try:
        options._devices = [
            kind.create_device(interface=interface) if interface else kind.create_default_device()
        ]
        return {
            name: kind(distributed.PrefixStore(name, store), rank, config.topology.ranks, options)
            for name in names
        }
    except RuntimeError as error:
        raise ConsensusError(f"the ranks cannot be connected: {first_line(error)}") from error


def _call_the_roll(store: Any, config: Config, rank: int, timeout_s: float) -> None:
    name, ranks = config.topology.name, config.topology.ranks
    if store.add(f"seat/{rank}", 1) > 1:
        raise ConfigError(
            f"two processes claim {name(rank)}, or the store's group has been used before: a new "
            f"group has a new name"
        )
    store.set(f"ranks/{rank}", b"%d" % ranks)
    limit = monotonic() + timeout_s
    for other in range(ranks):
        try:
            store.wait([f"ranks/{other}"], timedelta(seconds=max(limit - monotonic(), 0.001)))
            counted = int(store.get(f"ranks/{other}"))
        except RuntimeError as error:
            raise ConsensusError(
                f"{name(other)} did not come within {timeout_s:g} s: {first_line(error)}"
            ) from error
        if counted != ranks:
            raise ConfigError(f"ranks differs: {ranks} on rank {rank}, {counted} on rank {other}")


class Lane:
    """One process group, used by one thread; moves bytes.

    Whoever waits here sleeps in Python, and looks at the work in between: a thread that comes back
    from C++ while the interpreter ends takes the process down, and one that waits there cannot be
    told that the link has failed or is closed.

    Args:
        group: Of gloo.
        config: `peer_timeout_s` bounds every wait; the work is looked at once in `interval_s`,
            at first more often.
        check: Raises if there is no reason to wait any more.

    Attributes:
        check: The same.
        length: Of each frame; 0: none was gathered yet.
    """

    def __init__(self, group: Any, config: Config, check: Callable[[], None]) -> None:
        self.length, self.check = 0, check
        self._group = group
        self._ranks = config.topology.ranks
        self._timeout_s, self._longest_s = config.peer_timeout_s, config.interval_s
        self._tensor, self._uint8 = torch().frombuffer, torch().uint8

    def gather(self, frame: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Gives each rank's frame to all, by rank; blocks, at most `peer_timeout_s` by default.

        Raises:
            RuntimeError: gloo has failed, or the time is over; the group is of no use any more.
        """
        length = len(frame)
        buffer = bytearray(self._ranks * length)
        parts = self._tensor(buffer, dtype=self._uint8).split(length)
        own = self._tensor(bytearray(frame), dtype=self._uint8)
        timeout = timedelta(seconds=self._timeout_s if timeout_s is None else timeout_s)
        self._finish(self._group.allgather(list(parts), own, timeout=timeout))
        return [bytes(buffer[at : at + length]) for at in range(0, len(buffer), length)]

    def broadcast(self, chunk: bytes) -> bytes:
        """Returns the chunk of rank 0; blocks, at most `peer_timeout_s`. Raises as `gather`."""
        buffer = bytearray(chunk)
        tensor = self._tensor(buffer, dtype=self._uint8)
        self._finish(self._group.broadcast(tensor, 0, timeout=timedelta(seconds=self._timeout_s)))
        return bytes(buffer)

    def _finish(self, work: Any) -> None:
        began, pause = monotonic(), _FIRST_S
        try:
            while not work.is_completed():
                sleep(pause)
                self.check()
                pause = min(max(_FIRST_S, (monotonic() - began) / 4), self._longest_s)
        except BaseException:
            # The end of a group waits for its work, at worst until the peers' timeout, and holds
            # the interpreter meanwhile: this one has none.
            pythonapi.Py_IncRef(py_object(self._group))
            raise
        work.wait()
