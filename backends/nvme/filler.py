"""`page_set`: room first, then the slots, then their records, then everybody is told."""

from __future__ import annotations

import errno
from itertools import islice
from typing import TYPE_CHECKING

from l3store.backends.nvme.format import Geometry, pack_record
from l3store.backends.nvme.moving import Stretch, shared_out, spread
from l3store.errors import BackendUnavailable, CapacityError
from l3store.keys import split_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from l3store.abc import Segments
    from l3store.backends.nvme.catalog import Catalog
    from l3store.backends.nvme.estate import Estate
    from l3store.calls import Workers

__all__ = ["Filler"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ATTEMPTS = 3  # a segment that refuses a write is left alone, and its pages go elsewhere


class _Call:
    """One `store`, while it runs."""

    def __init__(self, keys: Sequence[str], pages: Sequence[Segments]) -> None:
        self.keys, self.pages = keys, pages
        self.done = [False] * len(keys)
        self.generations: dict[int, int] = {}  # of each page that is written
        self.failed: list[tuple[Stretch, OSError]] = []
        self.filled: list[Stretch] = []


class Filler:
    """Writes batches. Thread-safe; blocks for the drive."""

    def __init__(
        self, catalog: Catalog, estate: Estate, workers: Workers, count: int, *, durable: bool
    ) -> None:
        self._catalog, self._estate = catalog, estate
        self._workers, self._count, self._durable = workers, count, durable

    def store(
        self, keys: Sequence[str], pages: Sequence[Segments], lengths: Mapping[str, int]
    ) -> list[bool]:
        """As `Backend.page_set`; `lengths` are the payload bytes of each place in the call.

        Raises:
            CapacityError: Full, and nothing was stored.
            BackendUnavailable: The store cannot be written; `.done` says what is stored.
        """
        call = _Call(keys, pages)
        failure: OSError | None = None
        for _ in range(_ATTEMPTS):
            call.failed = []
            try:
                runs = self._begin(call, lengths)
                try:
                    failures = self._write(call, runs)
                finally:
                    failure = self._end(call, runs)
            except OSError as error:
                failure = error
                break
            for other in failures:
                if not isinstance(other, OSError):
                    raise other
                failure = failure or other
            if not any(error.errno == errno.EIO for _, error in call.failed):
                break
        self._copy_to_doubles(call)
        if failure is not None and failure.errno not in FULL:
            if isinstance(failure, BackendUnavailable):
                failure.done = call.done
                raise failure
            raise BackendUnavailable(failure.strerror or str(failure), done=call.done) from failure
        if keys and not any(call.done):
            raise CapacityError("no room for pages", done=call.done)
        return call.done

    def _begin(self, call: _Call, lengths: dict[str, int]) -> list[Stretch]:
        """Finds out what is to be written, and where to."""
        catalog, estate, keys = self._catalog, self._estate, call.keys
        with catalog.lock:
            catalog.refresh()
            found = catalog.found(split_keys(keys))
            missing: dict[str, int] = {}
            for i, at in enumerate(found):
                if at is not None:
                    call.done[i] = True
                else:
                    missing.setdefault(keys[i], i)
            there = {at for at in found if at is not None}
            estate.used(there)
            runs: list[Stretch] = []
            by_place: dict[str, list[int]] = {}
            for key, i in missing.items():
                by_place.setdefault(key[:-65], []).append(i)
            for name, wanted in by_place.items():
                geometry = Geometry(catalog.segment_bytes, lengths[name])
                keep = there | self._parents(call, name, wanted)
                left = iter(wanted)
                for segment, first, count in estate.room(name, geometry, len(wanted), keep):
                    runs.append(Stretch(segment, first, list(islice(left, count))))
            for run in runs:
                for i in run.pages:
                    call.generations[i] = next(estate.generations)
            estate.writing[id(call)] = [(run.segment, run.first, len(run.pages)) for run in runs]
        return runs

    def _parents(self, call: _Call, name: str, wanted: Iterable[int]) -> set[int]:
        """Where the pages lie that come right before these: they must not make room for them."""
        place = self._catalog.places.get(name)
        if place is None:
            return set()
        parents = (place.pages.get(bytes(call.pages[i][0][64:96])) for i in wanted)
        return {at for at in parents if at is not None}

    # -- in workers --------------------------------------------------------------------------

    def _write(self, call: _Call, runs: Sequence[Stretch]) -> list[Exception]:
        tasks = shared_out(runs, self._count)
        if not self._durable:
            return spread(tasks, lambda task: self._fill(call, task, True, True), self._workers)
        segments = list({id(run.segment): run.segment for run in runs}.values())
        self._estate.sync_cleared(segments)
        failures = spread(tasks, lambda task: self._fill(call, task, True, False), self._workers)
        filled, call.filled = call.filled, []
        for segment in segments:
            segment.sync()
        self._fill(call, filled, False, True)
        try:
            for segment in segments:
                segment.sync()
        except BaseException:
            call.filled = []  # not sure to survive a power cut, so not stored
            raise
        return failures

    def _fill(self, call: _Call, task: Sequence[Stretch], slots: bool, records: bool) -> None:
        for run in task:
            segment, pages = run.segment, call.pages
            try:
                if slots and not segment.write_slots(run.first, [pages[i][1:] for i in run.pages]):
                    raise OSError(errno.ENOSPC, "the file system took only part of a page")
                if records:
                    length = segment.geometry.payload_bytes
                    segment.write_records(run.first, b"".join(
                        [pack_record(pages[i][0], call.generations[i], length) for i in run.pages]
                    ))  # fmt: skip
            except OSError as error:
                call.failed.append((run, error))
                if error.errno not in (*FULL, errno.EIO):
                    raise
            else:
                call.filled.append(run)

    # -- afterwards --------------------------------------------------------------------------

    def _end(self, call: _Call, runs: Sequence[Stretch]) -> OSError | None:
        """Tells of what was filled, and gives back what was not. Returns why that failed."""
        catalog, estate = self._catalog, self._estate
        filled, call.filled = call.filled, []
        failure = None
        with catalog.lock:
            del estate.writing[id(call)]
            stored = [
                (run.segment, slot, i)
                for run in filled
                for slot, i in enumerate(run.pages, run.first)
            ]
            stored.sort(key=lambda one: one[2])
            try:
                estate.publish([
                    (segment, slot, bytes.fromhex(call.keys[i][-64:]),
                     bytes(call.pages[i][0][64:96]), call.generations[i])
                    for segment, slot, i in stored
                ])  # fmt: skip
            except OSError as error:
                failure = error
                stored = []
            for _, _, i in stored:
                call.done[i] = True
            told = {(id(segment), slot) for segment, slot, _ in stored}
            for run, refusal in call.failed:
                if refusal.errno == errno.EIO:
                    estate.fail(run.segment)
            for run in runs:
                unused = [slot for slot in range(run.first, run.first + len(run.pages))
                          if (id(run.segment), slot) not in told]  # fmt: skip
                if unused:
                    estate.put_back(run.segment, unused)
        return failure

    @staticmethod
    def _copy_to_doubles(call: _Call) -> None:
        """A key that stands in a call more than once is stored by its first page."""
        stored = {key for key, good in zip(call.keys, call.done, strict=True) if good}
        for i, key in enumerate(call.keys):
            call.done[i] = key in stored
