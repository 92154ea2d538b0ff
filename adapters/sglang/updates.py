"""Sees that the running engine's weights were updated: nothing tells a storage backend.

After an update SGLang empties L1 and L2, but L3 would go on to serve pages of the old weights under
the same hashes, without an error. Every update of weights ends in one method of the scheduler's
weight updater, and one that failed after the target had its new weights in another: both are
wrapped here, once a process, at the first attach.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_serving

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Updates", "seen", "watch"]

_log = logging.getLogger("l3store.sglang")


@dataclass(frozen=True, slots=True)
class Updates:
    """What became of the weights of this process's engine."""

    count: int = 0
    unnamed: bool = False
    """The last update told no weight version: nobody can say which weights these are."""
    version: str | None = None
    """``--weight-version``, or what the last update that named one said."""


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

        record = Updater.record_weight_version_after_update
        flush = Updater.flush_cache_after_weight_update
    except (ImportError, AttributeError) as error:
        _log.warning(
            "weight updates of this SGLang cannot be seen: detach L3 before one: %s", error
        )
        return
    if not hasattr(record, "__wrapped__"):
        Updater.record_weight_version_after_update = _noted(record)
        Updater.flush_cache_after_weight_update = _half_noted(flush)


def _noted(record: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(record)
    def noted(self: Any, weight_version: str | None) -> None:
        global _count, _unnamed
        _count, _unnamed = _count + 1, weight_version is None
        record(self, weight_version)

    return noted


def _half_noted(flush: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(flush)
    def noted(self: Any, recv_req: Any, success: bool, message: str) -> Any:
        global _count, _unnamed
        if not success:  # a draft's weights could not be loaded, and no version is recorded
            _count, _unnamed = _count + 1, True
        return flush(self, recv_req, success, message)

    return noted
