"""Signs of life through a store: who is lost, when a process group only says that somebody is.

Each rank counts up a key of its own and reads those of the others, on a thread of its own.
"""

from __future__ import annotations

from threading import Condition, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from l3store.consensus.agreement import PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from l3store.consensus.values import Config

__all__ = ["Beats", "Left"]

SILENT = 4
"""Beats of this rank without one of another rank: it may be the lost one. Counted, not timed: a
rank that gets no CPU itself does not suspect the others."""
LEFT = b"left"
_JOIN_S = 0.5


class Left(PeerLost):
    """A rank has left in peace: the records that came before it still count."""


class Beats:
    """The signs of life of one group, and the judgement which rank is lost. Thread-safe.

    Args:
        store: With `set` and `multi_get`; used by this object alone, as a call may hang.
        config: Of the group.
        rank: Of this process.
        host: Rank whose process serves the store, if any does: a silent store means it is lost.
        lost: Called once, from the thread of the beats, with a rank that is lost.
    """

    def __init__(
        self,
        store: Any,
        config: Config,
        rank: int,
        host: int | None,
        lost: Callable[[PeerLost], None],
    ) -> None:
        self._store, self._rank, self._host, self._lost = store, rank, host, lost
        self._name = config.topology.name
        self._timeout = config.peer_timeout_s
        self._every = min(config.heartbeat_s, 0.15, config.peer_timeout_s / 8)
        self._keys = [f"beat/{each}" for each in range(config.topology.ranks)]
        self._seen: list[bytes] = [b""] * len(self._keys)
        self._still = [0] * len(self._keys)  # beats since the last sign of each rank
        self._beat, self._beat_at = 0, monotonic()
        self._closed = self._dead = False
        self._turn = Condition()
        self._thread = Thread(target=self._run, name="l3store-beats", daemon=True)
        store.set(self._keys[rank], b"0")

    def start(self) -> None:
        """Begins; the key of every rank is there."""
        self._thread.start()

    def judge(self) -> PeerLost | None:
        """Returns which rank is lost, now that one is; blocks for some beats. None: who knows."""
        with self._turn:
            enough = self._beat + SILENT + 2
            while not (self._closed or self._silent() or self._beat >= enough or self._mute()):
                self._turn.wait(self._every)
            silent = self._silent()
            if silent:
                others = f", also {', '.join(map(self._name, silent[1:]))}" if silent[1:] else ""
                return PeerLost(
                    f"{self._name(silent[0])} is lost: no sign of life for "
                    f"{self._still[silent[0]] * self._every:.1f} s{others}", rank=silent[0],
                )  # fmt: skip
            host = self._host
            if self._mute() and host is not None and host != self._rank:
                # Its process may have ended because of a rank that left before.
                return self._gone(0) or PeerLost(
                    f"{self._name(host)} is lost: the store that it serves does not answer",
                    rank=host,
                )
            return self._gone()

    def close(self) -> None:
        """Says that this rank leaves; waits a moment for it to be heard."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            told = False
            while not self._closed:
                self._round()
                lost = None if told else self._overdue()
                if lost is not None:
                    told = True
                    self._lost(lost)
                with self._turn:
                    self._turn.wait_for(lambda: self._closed, self._every)
            self._store.set(self._keys[self._rank], LEFT)
        except RuntimeError:
            self._dead = True

    def _round(self) -> None:
        self._store.set(self._keys[self._rank], b"%d" % self._beat)
        values = self._store.multi_get(self._keys)
        with self._turn:
            self._beat, self._beat_at = self._beat + 1, monotonic()
            for rank, value in enumerate(values):
                self._still[rank] = self._still[rank] + 1 if value == self._seen[rank] else 0
                self._seen[rank] = value
            self._turn.notify_all()

    def _overdue(self) -> PeerLost | None:
        """What the group may not find by itself: silence for too long, and a rank that has left.

        That a rank left is believed late: it may have, because another one is lost.
        """
        with self._turn:
            for rank in self._silent():
                if self._still[rank] * self._every >= self._timeout:
                    return PeerLost(
                        f"{self._name(rank)} is lost: no sign of life for {self._timeout:g} s",
                        rank=rank,
                    )
            return self._gone() if not self._silent() else None

    def _mute(self) -> bool:
        """Whether the store does not answer."""
        return self._dead or monotonic() - self._beat_at > (SILENT + 2) * self._every

    def _silent(self) -> list[int]:
        return [
            rank
            for rank, still in enumerate(self._still)
            if still >= SILENT and self._seen[rank] != LEFT and rank != self._rank
        ]

    def _gone(self, beats: int = 2 * SILENT) -> Left | None:
        """Which rank left first, if that is so many beats ago."""
        left = [rank for rank, value in enumerate(self._seen) if value == LEFT]
        first = max(left, key=lambda rank: self._still[rank], default=self._rank)
        if first == self._rank or self._still[first] < beats:
            return None
        return Left(f"{self._name(first)} has left the group", rank=first)
