"""`page_get`: records first, then the slots, each page checked by the thread that read it."""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from l3store.backends.nvme.format import LIVE, RECORD_BYTES, record_holds, records
from l3store.backends.nvme.journal import COUNTERS
from l3store.backends.nvme.moving import Stretch, shared_out, spread, stretches
from l3store.errors import BackendUnavailable
from l3store.keys import split_keys
from l3store.page import judged, opener

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from l3store.abc import Check, Segments
    from l3store.backends.nvme.catalog import Catalog
    from l3store.backends.nvme.estate import Estate
    from l3store.backends.nvme.segment import Segment
    from l3store.calls import Workers

__all__ = ["Reader"]


@dataclass(frozen=True)
class _Refused:
    """A slot that did not hold the page that was looked for."""

    segment: Segment
    slot: int
    value: bytes
    """The hash of that page."""
    record: bytes
    """As it was before the read."""
    what: Literal["damaged", "gone", "replaced"]
    """The record is still that one, so the bytes are wrong; the slot is empty, or holds another
    page; or it holds this page anew."""


_TASK_BYTES = 4 << 20  # small, so that pages are checked while others arrive


class _Call:
    """One `get`, while it runs."""

    def __init__(self, keys: Sequence[str], into: Sequence[Segments], check: Check | None) -> None:
        self.keys, self.into, self.check = keys, into, check
        self.names = split_keys(keys)
        self.done = [False] * len(keys)
        self.refused: list[_Refused] = []


class Reader:
    """Reads batches. Thread-safe; blocks for the drive."""

    def __init__(self, catalog: Catalog, estate: Estate, workers: Workers, count: int) -> None:
        self._catalog, self._estate = catalog, estate
        self._workers, self._count = workers, count
        self.counts = dict.fromkeys(COUNTERS, 0)
        """What this process read; guarded by the store's lock."""
        self.touched: set[int] = set()
        """Index values of peers' pages that were read, until the peers are told."""

    def get(
        self,
        keys: Sequence[str],
        into: Sequence[Segments],
        check: Check | None,
        lengths: Mapping[str, int],
        *,
        repair: bool,
    ) -> list[bool]:
        """As `Backend.page_get`.

        Args:
            keys: Object names.
            into: Buffers.
            check: Judges a page; None: what the records say is believed.
            lengths: Payload bytes of each place in the call.
            repair: Whether damaged pages are removed from the store, or only from the index.

        Raises:
            BackendUnavailable: The drive or the store's folder cannot be read.
            ValueError: Pages of a place have another length in this store.
        """
        catalog, estate = self._catalog, self._estate
        call = _Call(keys, into, check)
        with catalog.lock:
            catalog.refresh()
            catalog.check_lengths(lengths)
            locations = catalog.found(call.names, unproved=True)
            runs = stretches(locations, catalog.segments)
            unproved = any(run.segment.unproved for run in runs)
            there = {at for at in locations if at is not None}
            if check is None and unproved:
                call.check = opener(keys)
            estate.reading[id(call)] = there
        try:
            failures = spread(
                shared_out(runs, self._count, _TASK_BYTES), lambda task: self._read_all(call, task),
                self._workers,
            )  # fmt: skip
        finally:
            with catalog.lock:
                del estate.reading[id(call)]
        with catalog.lock:
            self._learn(call, runs, there, unproved, repair)
        for failure in failures:
            if isinstance(failure, OSError):
                raise BackendUnavailable(
                    failure.strerror or str(failure), done=call.done
                ) from failure
            raise failure
        return call.done

    def _learn(
        self, call: _Call, runs: Sequence[Stretch], there: set[int], unproved: bool, repair: bool
    ) -> None:
        """Takes in what the read showed, inside the store's lock."""
        catalog, estate, counts = self._catalog, self._estate, self.counts
        counts["pages_read"] += len(there)
        counts["runs_read"] += len(runs)
        if unproved:
            for run in runs:
                for slot, i in enumerate(run.pages, run.first):
                    if call.done[i] and catalog.segments.get(run.segment.number) is run.segment:
                        catalog.prove(run.segment, slot)
        for refused in call.refused:
            segment, slot = refused.segment, refused.slot
            counts["damaged" if refused.what == "damaged" else "recycled"] += 1
            if refused.what == "replaced" or catalog.segments.get(segment.number) is not segment:
                continue
            if segment.pages[slot] != refused.value:
                continue  # another call has learnt it, and perhaps what is there since
            if refused.what == "damaged" and repair:
                try:
                    if estate.remove(segment, slot, refused.record):
                        continue
                except OSError:
                    if estate.owns(segment):
                        continue  # as long as it is there its slot is not free
                    catalog.unread.add(segment.number)
            if catalog.remove(segment, slot):
                estate.gone(segment, [slot])
        estate.free_retired()
        estate.used({name for name, _ in call.names}, there)
        if repair:
            self.touched |= there

    # -- in a worker -------------------------------------------------------------------------

    def _read_all(self, call: _Call, task: Sequence[Stretch]) -> None:
        for run in task:
            try:
                self._read(call, run)
            except OSError as error:
                if error.errno == errno.ENOENT:  # its segment was given up
                    self._refuse(call, run, error.errno)
                elif error.errno == errno.EIO and len(run.pages) > 1:
                    for slot, i in enumerate(run.pages, run.first):  # which of them is it?
                        self._read_all(call, [Stretch(run.segment, slot, [i])])
                elif error.errno == errno.EIO:
                    self._refuse(call, run, error.errno)
                else:
                    raise

    def _refuse(self, call: _Call, run: Stretch, code: int) -> None:
        for slot, i in enumerate(run.pages, run.first):
            value, record = _value(call.keys[i]), b""
            if code == errno.ENOENT:
                call.refused.append(_Refused(run.segment, slot, value, record, "gone"))
                continue
            with suppress(OSError):
                record = run.segment.read_records(slot, 1)
            what: Literal["damaged", "gone"] = "gone" if _of_another(record, value) else "damaged"
            call.refused.append(_Refused(run.segment, slot, value, record, what))

    def _read(self, call: _Call, run: Stretch) -> None:
        segment, first, count = run.segment, run.first, len(run.pages)
        table = segment.read_records(first, count)
        check, length = call.check, segment.geometry.payload_bytes
        pages = [call.into[i] for i in run.pages]
        parsed = records(table)
        for page, record in zip(pages, parsed, strict=True):
            page[0][:] = record[0]
        whole = segment.read_slots(first, [page[1:] for page in pages])
        if check is None:
            good = self._steady(call, run, table)
        else:
            # A slot that was freed meanwhile has nothing to check: a miss, and no damage.
            good = judged(check, pages, [any(record[0]) for record in parsed], run.pages)
        bad: list[int] = []
        for at, (i, record, right) in enumerate(zip(run.pages, parsed, good, strict=True)):
            if right and whole and record[2] == LIVE and record[4] == length:
                call.done[i] = True
            else:
                bad.append(at)
        if bad:
            self._judge(call, run, table, bad)

    def _steady(self, call: _Call, run: Stretch, table: bytes) -> list[bool]:
        """Without a check: was each slot the page's own before the read, and is it still?"""
        now = run.segment.read_records(run.first, len(run.pages))
        good = []
        for at, i in enumerate(run.pages):
            record = table[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]
            good.append(
                record == now[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]
                and record_holds(record)
                and record[32:64].hex() == call.keys[i][-64:]
            )
        return good

    def _judge(self, call: _Call, run: Stretch, table: bytes, bad: Sequence[int]) -> None:
        """Were these filled anew since the index was looked at, or are they damaged?"""
        for at in bad:
            value = _value(call.keys[run.pages[at]])
            before = table[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]
            now = run.segment.read_records(run.first + at, 1)
            what: Literal["damaged", "gone", "replaced"] = "gone"
            if _of_another(now, value):
                pass  # before the read or during it: a good page, and nobody's to remove
            elif now == before and any(now):
                what = "damaged"
            elif record_holds(now):
                what = "replaced"
            call.refused.append(_Refused(run.segment, run.first + at, value, before, what))


def _value(key: str) -> bytes:
    return bytes.fromhex(key[-64:])


def _of_another(record: bytes, value: bytes) -> bool:
    """Returns whether a record is that of another page, and whole."""
    return len(record) == RECORD_BYTES and record[32:64] != value and record_holds(record)
