"""A page that is wrong is never served: it is a miss, is counted, and is removed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from l3store.errors import L3Error
from l3store.metrics import METRICS, REFUSED
from l3store.page import judged, opener
from l3store.wrap._base import Wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.abc import Backend, Check, Segments
    from l3store.metrics import Metrics

__all__ = ["Verify"]

_log = logging.getLogger(__name__)


class Verify(Wrapper):
    """Checks every page that `page_get` reads.

    A backend with the capability `checks` does it in its own worker; for the others it is done
    here, in the caller's thread, after the call (about 50 us/MiB from memory). A page that fails is
    False, counted by reason, and removed where the backend can delete, provided that the store
    still holds the very header that was read.
    """

    def __init__(self, inner: Backend, *, name: str = "", metrics: Metrics = METRICS) -> None:
        super().__init__(inner)
        self._name, self._metrics = name, metrics

    def page_get(  # noqa: D102 - as in Backend
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        ours = None
        if check is None:  # the caller's own check is the caller's to count
            check = ours = opener(keys)
        checked = self.capabilities.checks
        try:
            done = self.inner.page_get(keys, into, check)
        except L3Error as error:
            if not checked:
                error.done = self._checked(keys, into, check, error.done)
            raise
        else:
            return done if checked else self._checked(keys, into, check, done)
        finally:
            if ours is not None and ours.reasons:
                self._metrics.add(
                    *((REFUSED, (self._name, why), n) for why, n in ours.reasons.items())
                )

    def _checked(
        self,
        keys: Sequence[str],
        into: Sequence[Segments],
        check: Check,
        done: Sequence[bool],
    ) -> list[bool]:
        # An error's `done` may be shorter: nothing is known of the others.
        good = judged(check, into[: len(done)], done, range(len(done)))
        bad = [i for i, arrived in enumerate(done) if arrived and not good[i]]
        if bad and self.capabilities.delete:
            try:
                self.inner.delete([keys[i] for i in bad], [bytes(into[i][0]) for i in bad])
            except L3Error as error:
                # Not the reader's trouble: the page stays refused, and the next reader tries again.
                _log.warning("damaged pages could not be removed: %s", error)
        return good
