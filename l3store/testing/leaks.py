"""What a process holds: descriptors and threads, counted over rounds of the same thing."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Held", "check_leaks", "held"]


class Held(NamedTuple):
    """Descriptors (number -> what it is) and names of threads of this process."""

    descriptors: dict[int, str]
    threads: list[str]

    @property
    def counts(self) -> tuple[int, int]:
        """How many of each."""
        return len(self.descriptors), len(self.threads)


def held() -> Held:
    """Returns what this process holds now; threads are the kernel's, not only Python's."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # that of the listing itself
            continue
    known = {one.native_id: one.name for one in threading.enumerate()}
    return Held(found, [known.get(int(n), "not Python's") for n in os.listdir("/proc/self/task")])


def check_leaks(
    one_round: Callable[[], object], *, rounds: int = 20, warm_up: int = 1, seconds: float = 5.0
) -> None:
    """Runs the same thing again and again, and fails if the process then holds more than before.

    Args:
        one_round: What must leave nothing behind.
        rounds: How often it runs after the count.
        warm_up: How often before: pools of connections and threads fill up.
        seconds: How long to wait for what ends a little later.

    Raises:
        AssertionError: It names the descriptors and threads that came.
    """
    for _ in range(warm_up):
        one_round()
    gc.collect()
    before = held()
    for _ in range(rounds):
        one_round()
    gc.collect()
    after = _settled(before.counts, seconds=seconds)
    if any(now > then for now, then in zip(after.counts, before.counts, strict=True)):
        descriptors = [what for number, what in after.descriptors.items()
                       if before.descriptors.get(number) != what]  # fmt: skip
        threads = list(after.threads)
        for name in before.threads:
            if name in threads:
                threads.remove(name)
        raise AssertionError(
            f"after {rounds} rounds {after.counts[0]} descriptors instead of {before.counts[0]} "
            f"and {after.counts[1]} threads instead of {before.counts[1]}; new: "
            f"descriptors {descriptors}, threads {threads}"
        )


def _settled(goal: tuple[int, int], *, seconds: float) -> Held:
    """Returns what is held once it is no more than `goal`, or what it is after `seconds`."""
    limit = time.monotonic() + seconds
    while True:
        now = held()
        few = all(count <= least for count, least in zip(now.counts, goal, strict=True))
        if few or time.monotonic() > limit:
            return now
        time.sleep(0.02)
