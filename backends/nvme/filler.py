"""`page_set`: room first, then the slots, then their records, then everybody is told."""

from __future__ import annotations

import errno
from itertools import islice
from typing import TYPE_CHECKING

from l3store.backends._folder_backend import FULL
from l3store.backends.nvme.format import Geometry, pack_records
from l3store.backends.nvme.moving import Stretch, shared_out, spread
from l3store.backends.nvme.shelf import Run
from l3store.errors import BackendUnavailable, CapacityError
from l3store.keys import split_keys
from l3store.page import PARENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from l3store.abc import Segments
    from l3store.backends.nvme.catalog import Catalog
    from l3store.backends.nvme.estate import Estate
    from l3store.calls import Workers

__all__ = ["Filler"]

_ATTEMPTS = 3  # a segment that refuses a write is left alone, and its pages go elsewhere


_TASK_BYTES = 8 << 20


class _Call:
    """One `store`, while it runs."""

    def __init__(self, keys: Sequence[str], pages: Sequence[Segments]) -> None:
        self.keys, self.pages = keys, pages
        self.done = [False] * len(keys)
        self.names = split_keys(keys)
        self.hashes = [value for _, part in self.names for value in part]
        self.parents = [bytes(page[0][PARENT]) for page in pages]
        self.generation = 0
        self.failed: list[tuple[Stretch, OSError]] = []
        self.moved: list[Stretch] = []
        self.filled: list[Stretch] = []
        """Moved, and their records are written: all that may be told."""


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
            refused = [error for _, error in call.failed if error.errno == errno.EIO]
            if not refused:
                break
            failure = failure or refused[0]
        self._copy_to_doubles(call)
        if failure is not None and failure.errno not in FULL:
            if isinstance(failure, BackendUnavailable):
                failure.done = call.done
                raise failure
            raise BackendUnavailable(failure.strerror or str(failure), done=call.done) from failure
        if keys and not any(call.done):
            raise CapacityError(self._estate.why_full(), done=call.done)
        return call.done

    def _begin(self, call: _Call, lengths: Mapping[str, int]) -> list[Stretch]:
        """Finds out what is to be written, and where to."""
        catalog, estate = self._catalog, self._estate
        with catalog.lock:
            catalog.refresh()
            catalog.check_lengths(lengths)
            found = catalog.found(call.names)
            there = {at for at in found if at is not None}
            for i, at in enumerate(found):
                call.done[i] = at is not None
            at = 0
            runs: list[Stretch] = []
            by_place: dict[str, dict[bytes, int]] = {}
            for name, hashes in call.names:
                wanted = by_place.setdefault(name, {})
                for i, value in enumerate(hashes, at):
                    if found[i] is None:
                        wanted.setdefault(value, i)
                at += len(hashes)
            # What one place has or takes here must not make room for the next.
            taken = estate.writing[id(call)] = list[Run]()
            estate.reading[id(call)] = there
            try:
                for name, wanted in by_place.items():
                    if wanted:
                        here = self._room(call, name, list(wanted.values()), lengths[name], there)
                        taken += [(run.segment, run.first, len(run.pages)) for run in here]
                        runs += here
            except BaseException:
                del estate.writing[id(call)]
                for run in runs:
                    estate.put_back(run.segment, range(run.first, run.first + len(run.pages)))
                raise
            finally:
                del estate.reading[id(call)]
            if there:
                estate.used(by_place, there)
            call.generation = estate.generation()
        return runs

    def _room(
        self, call: _Call, name: str, wanted: Sequence[int], length: int, there: set[int]
    ) -> list[Stretch]:
        """Takes slots for pages of one place, for as many of the first as there is room."""
        keep, place = set(there), self._catalog.places.get(name)
        if place is not None:  # what comes right before them must not make room for them
            index = place.pages
            keep.update(at for i in wanted if (at := index.get(call.parents[i])) is not None)
        geometry = Geometry(self._catalog.segment_bytes, length)
        left = iter(wanted)
        return [
            Stretch(segment, first, list(islice(left, count)))
            for segment, first, count in self._estate.room(name, geometry, len(wanted), keep)
        ]

    # -- in workers --------------------------------------------------------------------------

    def _write(self, call: _Call, runs: Sequence[Stretch]) -> list[BaseException]:
        """Fills the slots and then writes their records.

        All slots first: a write of records through the page cache waits until no direct I/O is
        under way in its file.
        """
        segments = list({id(run.segment): run.segment for run in runs}.values())
        call.moved = []
        if self._durable:
            self._estate.sync_cleared(segments)
        failures = spread(
            shared_out(runs, self._count, _TASK_BYTES),
            lambda task: self._fill(call, task),
            self._workers,
        )
        whole = not (failures or call.failed)  # then one call a run
        if self._durable:
            for segment in segments:
                segment.sync()
        for run in runs if whole else call.moved:
            self._record(call, run)
        if self._durable:
            try:
                for segment in segments:
                    segment.sync()
            except BaseException:
                call.filled = []  # not sure to survive a power cut, so not stored
                raise
        return failures

    @staticmethod
    def _fill(call: _Call, task: Sequence[Stretch]) -> None:
        for run in task:
            pages = [call.pages[i][1:] for i in run.pages]
            try:
                if not run.segment.write_slots(run.first, pages):
                    raise OSError(errno.ENOSPC, "the file system took only part of a page")
            except OSError as error:
                _refused(call, run, error)
            else:
                call.moved.append(run)

    @staticmethod
    def _record(call: _Call, run: Stretch) -> None:
        headers = [call.pages[i][0] for i in run.pages]
        length = run.segment.geometry.payload_bytes
        try:
            run.segment.write_records(
                run.first, pack_records(headers, call.generation + run.first, length)
            )
        except OSError as error:
            _refused(call, run, error)
        else:
            call.filled.append(run)

    # -- afterwards --------------------------------------------------------------------------

    def _end(self, call: _Call, runs: Sequence[Stretch]) -> OSError | None:
        """Tells of what was filled, and gives back what was not. Returns why that failed."""
        estate, failure = self._estate, None
        filled, call.filled = call.filled, []
        told: set[int] = set()
        with self._catalog.lock:
            del estate.writing[id(call)]
            by_place: dict[str, list[Stretch]] = {}
            for run in sorted(filled, key=lambda run: run.pages[0]):
                if not estate.settled(run.segment):
                    continue  # somebody removed its file, and its number is another's
                by_place.setdefault(run.segment.place, []).append(run)
            for place, here in by_place.items():
                pages = [i for run in here for i in run.pages]
                try:
                    estate.publish(
                        place, [(run.segment, run.first, len(run.pages)) for run in here],
                        [call.hashes[i] for i in pages], [call.parents[i] for i in pages],
                        call.generation,
                    )  # fmt: skip
                except OSError as error:
                    failure = error
                else:
                    told.update(pages)
            for i in told:
                call.done[i] = True
            for run, refusal in call.failed:
                if refusal.errno == errno.EIO:
                    estate.fail(run.segment)
            if len(told) < sum(len(run.pages) for run in runs):
                for run in runs:
                    slots = [slot for slot, i in enumerate(run.pages, run.first) if i not in told]
                    estate.put_back(run.segment, slots)
        return failure

    @staticmethod
    def _copy_to_doubles(call: _Call) -> None:
        """A key that stands in a call more than once is stored by its first page."""
        stored = {key for key, good in zip(call.keys, call.done, strict=True) if good}
        for i, key in enumerate(call.keys):
            call.done[i] = key in stored


def _refused(call: _Call, run: Stretch, error: OSError) -> None:
    call.failed.append((run, error))
    if error.errno not in (*FULL, errno.EIO):
        raise error
