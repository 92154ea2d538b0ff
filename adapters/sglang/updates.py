"""Sees that the running engine's weights were updated: nothing tells a storage backend.

After an update SGLang empties L1 and L2, but L3 would go on to serve pages of the old weights under
the same hashes, without an error. Whatever writes weights goes through a few methods of each model
runner's weight updater, also where it fails half-way or nothing is recorded (P2P). The scheduler's
own tells the version of an update that succeeded. They are wrapped here, once a process, at the
first attach.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_serving

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["UNVERSIONED", "Updates", "seen", "watch"]

UNVERSIONED = "default"
"""What ``--weight-version`` is when nobody tells it: no name of any weights."""

_log = logging.getLogger("l3store.sglang")


@dataclass(frozen=True, slots=True)
class Updates:
    """What became of the weights of this process's engine."""

    count: int = 0
    unnamed: bool = False
    """The last update failed or told no version: nobody can say which weights these are."""
    version: str | None = None
    """``--weight-version``, or what the last update that named one said; `UNVERSIONED`: none."""


_BEGINS = (
    "begin_weight_update",
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "load_weights_from_distributed",
)
"""Of a model runner's weight updater: all that write weights, or let somebody write them."""

_count, _unnamed = 0, False


def seen() -> Updates:
    """Returns what happened up to now. Cheap; any thread."""
    return Updates(_count, _unnamed, get_serving().weight_version)


def watch() -> None:
    """Begins to see updates. The scheduler's main thread; a second call is a no-op."""
    try:
        from sglang.srt.managers.scheduler_components.weight_updater import (
            SchedulerWeightUpdaterManager as Updater,
        )
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        record = Updater.record_weight_version_after_update
        begins = {name: getattr(WeightUpdater, name) for name in _BEGINS}
    except (ImportError, AttributeError) as error:
        _log.warning(
            "weight updates of this SGLang cannot be seen: detach L3 before one: %s", error
        )
        return
    if not hasattr(record, "__wrapped__"):
        Updater.record_weight_version_after_update = _noted(record)
        for name, begin in begins.items():
            setattr(WeightUpdater, name, _begun(begin))


def _begun(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def begun(*args: Any, **kwargs: Any) -> Any:
        global _count, _unnamed
        # Before it, and whatever comes of it: a load that failed has written some weights.
        _count, _unnamed = _count + 1, True
        return begin(*args, **kwargs)

    return begun


def _noted(record: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(record)
    def noted(self: Any, weight_version: str | None) -> None:
        global _count, _unnamed
        _count, _unnamed = _count + 1, weight_version in (None, UNVERSIONED)
        record(self, weight_version)

    return noted
