"""Backends that break one promise each, and two that break none.

`expect` is the promise whose tests must fail.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import replace

from l3store.abc import PlaceUsage
from l3store.backends.file import FileBackend
from l3store.backends.memory import MemoryBackend
from l3store.errors import BackendUnavailable, CapacityError
from l3store.keys import check_keys

BROKEN, HEALTHY = {}, {}


def breaks(promise, *, evicts=False):
    """Registers a broken backend."""

    def register(kind):
        kind.expect, kind.evicts = promise, evicts
        BROKEN[kind.__name__.lower()] = kind
        return kind

    return register


def healthy(kind):
    """Registers a backend that must pass: else the failures of the others prove nothing."""
    kind.expect, kind.evicts = None, False
    HEALTHY[kind.__name__.lower()] = kind
    return kind


@healthy
class HealthyMemory(MemoryBackend):
    pass


@healthy
class HealthyFile(FileBackend):
    pass


@breaks(2)
class ShortReadIsAHit(MemoryBackend):
    def _copy(self, key, data, segments):
        if data is None:
            return False
        return super()._copy(key, data.ljust(sum(s.nbytes for s in segments), b"\0"), segments)


@breaks(2)
class LongReadIsAHit(MemoryBackend):
    def _copy(self, key, data, segments):
        return super()._copy(key, data and data[: sum(s.nbytes for s in segments)], segments)


@breaks(2)
class LastSegmentIsForgotten(MemoryBackend):
    def page_get(self, keys, into, check=None):
        spare = [(*s[:-1], memoryview(bytearray(s[-1].nbytes))) for s in into]
        return super().page_get(keys, spare, check)


@breaks(12)
class StalePage(MemoryBackend):
    """Remembers what it read and does not notice that it was deleted."""

    def page_get(self, keys, into, check=None):
        done = super().page_get(keys, into, check)
        kept = self.__dict__.setdefault("kept", set())
        kept |= {key for key, good in zip(keys, done, strict=True) if good}
        return [good or key in kept for key, good in zip(keys, done, strict=True)]

    def delete(self, keys, headers=None):
        self.__dict__.setdefault("kept", set()).update(k for k in keys if k in self._pages)
        return super().delete(keys, headers)


@breaks(1)
class VisibleBeforeWhole(FileBackend):
    def _write(self, key, page):
        place, _, digits = key.rpartition("/")
        folder = f"{self._folder.name}/pages/{place}/{digits[:2]}"
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/{digits}", "wb", buffering=0) as file:
            for piece in page:
                file.write(piece)
                time.sleep(0.002)
        return True


@breaks(4)
class ExistsOneTooMany(MemoryBackend):
    def batch_exists(self, keys):
        return min(super().batch_exists(keys) + 1, len(keys))


@breaks(4)
class ExistsOneTooFew(MemoryBackend):
    def batch_exists(self, keys):
        return max(super().batch_exists(keys) - 1, 0)


@breaks(4)
class ExistsCountsBehindHoles(MemoryBackend):
    def batch_exists(self, keys):
        return sum(self.exists_each(keys))


class _Renaming(MemoryBackend):
    @staticmethod
    def name(key):
        raise NotImplementedError

    def batch_exists(self, keys):
        return super().batch_exists([self.name(key) for key in keys])

    def exists_each(self, keys):
        return super().exists_each([self.name(key) for key in keys])

    def page_get(self, keys, into, check=None):
        return super().page_get([self.name(key) for key in keys], into, check)

    def page_set(self, keys, pages):
        return super().page_set([self.name(key) for key in keys], pages)

    def delete(self, keys, headers=None):
        return super().delete([self.name(key) for key in keys], headers)

    def _check_lengths(self, lengths):
        pass


@breaks(9)
class KeyWithoutShard(_Renaming):
    @staticmethod
    def name(key):
        check_keys([key])
        namespace, pool, _, digits = key.split("/")
        return f"{namespace}/{pool}/all/{digits}"


@breaks(9)
class KeyWithoutNamespace(_Renaming):
    @staticmethod
    def name(key):
        check_keys([key])
        return "x/" + key.split("/", 1)[1]


@breaks(9)
class KeyWithoutPool(_Renaming):
    @staticmethod
    def name(key):
        check_keys([key])
        namespace, _, shard, digits = key.split("/")
        return f"{namespace}/kv/{shard}/{digits}"


@breaks(7)
class SwallowedError(FileBackend):
    """What cannot be reached is called absent."""

    def batch_exists(self, keys):
        try:
            return super().batch_exists(keys)
        except BackendUnavailable:
            return 0

    def page_get(self, keys, into, check=None):
        try:
            return super().page_get(keys, into, check)
        except BackendUnavailable:
            return [False] * len(keys)


@breaks(7)
class UnreachableIsCalledFull(FileBackend):
    def page_set(self, keys, pages):
        try:
            return super().page_set(keys, pages)
        except BackendUnavailable:
            return [False] * len(keys)


@breaks(7)
class AlwaysHealthy(FileBackend):
    def health(self):
        pass


@breaks(7)
class BareVendorError(FileBackend):
    def _call(self):
        return self._gate


@breaks(10)
class WritesAfterReturn(MemoryBackend):
    def page_get(self, keys, into, check=None):
        done = super().page_get(keys, into, check)

        def again():
            time.sleep(0.003)
            for segments in into:
                segments[0][:] = bytes(segments[0].nbytes)

        threading.Thread(target=again).start()
        return done


@breaks(11)
class SaysStoredWhenFull(MemoryBackend):
    def page_set(self, keys, pages):
        with suppress(CapacityError):
            super().page_set(keys, pages)
        return [True] * len(keys)


@breaks(11)
class FullLosesWhatItTook(MemoryBackend):
    """An error, as if nothing had been stored, although something was."""

    def page_set(self, keys, pages):
        done = super().page_set(keys, pages)
        if not all(done):
            raise CapacityError("full", done=[False] * len(keys))
        return done


@breaks(11)
class FullIsNoError(MemoryBackend):
    def page_set(self, keys, pages):
        try:
            return super().page_set(keys, pages)
        except CapacityError as error:
            return error.done


@breaks(11, evicts=True)
class EvictsAndSaysStored(MemoryBackend):
    """What the batch itself has pushed out again is called stored."""

    def page_set(self, keys, pages):
        return [True] * len(super().page_set(keys, pages))


@breaks(11)
class DoneLies(FileBackend):
    """An error half way calls all pages stored."""

    def page_set(self, keys, pages):
        try:
            return super().page_set(keys, pages)
        except BackendUnavailable as error:
            raise BackendUnavailable(str(error), done=[True] * len(keys)) from error


@breaks(12)
class DescriptorsAreNotAtomic(FileBackend):
    def put_meta(self, name, data):
        super().put_meta(name, data[: len(data) // 2])
        super().put_meta(name, data)


@breaks(12)
class DescriptorsWithoutLimit(MemoryBackend):
    def put_meta(self, name, data):
        self._meta[name] = bytes(data)


@breaks(4)
class DuplicatesAreDropped(MemoryBackend):
    def page_get(self, keys, into, check=None):
        unique = list(dict.fromkeys(keys))
        return super().page_get(unique, into[: len(unique)], check)


@breaks(4)
class OrderIsLost(MemoryBackend):
    def page_get(self, keys, into, check=None):
        return super().page_get(sorted(keys), into, check)


@breaks(4)
class ReadingStopsAtAHole(MemoryBackend):
    def page_get(self, keys, into, check=None):
        done = super().page_get(keys, into, check)
        run = done.index(False) if False in done else len(done)
        return done[:run] + [False] * (len(done) - run)


@breaks(9)
class AnyDescriptorName(MemoryBackend):
    def put_meta(self, name, data):
        self._meta[name] = bytes(data)


@breaks(4)
class HalfIsDroppedSilently(MemoryBackend):
    def page_set(self, keys, pages):
        super().page_set(keys[: len(keys) // 2 + 1], pages[: len(keys) // 2 + 1])
        return [True] * len(keys)


@breaks(9)
class HostileNamesAreAccepted(MemoryBackend):
    def batch_exists(self, keys):
        return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))


@breaks(12)
class ServesAfterClose(MemoryBackend):
    def close(self):
        pass


@breaks(5)
class LeaksDescriptors(FileBackend):
    def page_get(self, keys, into, check=None):
        os.open(self._folder.name, os.O_RDONLY)
        return super().page_get(keys, into, check)


@breaks(5)
class LeaksThreads(MemoryBackend):
    def __init__(self, options=None):
        super().__init__(options)
        threading.Thread(target=lambda: time.sleep(30), daemon=True).start()


@breaks(5)
class ForgetsOnClose(FileBackend):
    def close(self):
        for usage in self.usage() if not self._gate._shut else ():
            self.delete(list(self.scan(usage.place)))
        super().close()


@breaks(5)
class CachesWhatIsAbsent(FileBackend):
    """Does not see what another process stores once it has looked."""

    def batch_exists(self, keys):
        absent = self.__dict__.setdefault("absent", set())
        run = next((i for i, key in enumerate(keys) if key in absent), len(keys))
        run = super().batch_exists(keys[:run])
        absent.update(keys[run : run + 1])
        return run

    def page_set(self, keys, pages):
        done = super().page_set(keys, pages)
        self.__dict__.setdefault("absent", set()).difference_update(keys)
        return done


@breaks(3)
class NeverChecks(FileBackend):
    """Declares `checks` and does not call the check."""

    def page_get(self, keys, into, check=None):
        return super().page_get(keys, into)


@breaks(3)
class DamageStays(MemoryBackend):
    def delete(self, keys, headers=None):
        return [False] * len(keys)

    def _copy(self, key, data, segments):
        return len(data or b"") == sum(s.nbytes for s in segments) and super()._copy(
            key, data, segments
        )


@breaks(3)
class DeletesWhateverIsThere(MemoryBackend):
    """Ignores the header it was given."""

    def delete(self, keys, headers=None):
        return super().delete(keys)


@breaks(8)
class KeepsTheCallersMemory(MemoryBackend):
    def _store(self, key, data, parent):
        pass

    def page_set(self, keys, pages):
        done = super().page_set([], []) or [True] * len(keys)
        self._pages.update(zip(keys, (_Joined(page) for page in pages), strict=True))
        return done


class _Joined:
    def __init__(self, page):
        self._page = page

    def __len__(self):
        return sum(piece.nbytes for piece in self._page)

    def __getitem__(self, at):
        return b"".join(self._page)[at]

    def __buffer__(self):
        return memoryview(b"".join(self._page))


def _unjoin(self, key, data, segments):
    return MemoryBackend._copy(self, key, data and b"".join(data._page), segments)


KeepsTheCallersMemory._copy = _unjoin


@breaks(8)
class CopiesTheWholeBatch(MemoryBackend):
    def page_get(self, keys, into, check=None):
        copies = [bytearray(self._pages.get(key, b"")) for key in keys]
        done = super().page_get(keys, into, check)
        del copies
        return done


@breaks(8)
class ChangesWhatIsSet(MemoryBackend):
    def page_set(self, keys, pages):
        for page in pages:
            if not page[0].readonly:
                page[0][100] = 1
        for page in pages:
            page[0][100:104] = page[0][100:104]
        return super().page_set(keys, pages)


@breaks(12)
class AnyLengthInAPlace(MemoryBackend):
    def _check_lengths(self, lengths):
        pass


@breaks(12)
class UsageCountsWrong(MemoryBackend):
    def usage(self):
        return [
            PlaceUsage(u.place, u.pages, u.payload_bytes + 1, u.stored_bytes)
            for u in super().usage()
        ]


@breaks(12)
class ScanForgetsAPlace(MemoryBackend):
    def scan(self, place=None):
        return (key for key in super().scan(place) if "/indexer/" not in key)


@breaks(12)
class UndeclaredIsSilent(MemoryBackend):
    capabilities = replace(MemoryBackend.capabilities, headers=False)


@breaks(6)
class TakesItsTime(MemoryBackend):
    """Declares that it can be interrupted, and cannot: its own time-outs are not set."""

    def health(self):
        time.sleep(6)


@breaks(10)
class RetriesAfterRaise(FileBackend):
    """A read that failed goes on in the background and fills the buffers when the store is back."""

    def page_get(self, keys, into, check=None):
        try:
            return super().page_get(keys, into, check)
        except BackendUnavailable:
            threading.Thread(target=self._later, args=(keys, into), daemon=True).start()
            raise

    def _later(self, keys, into):
        for _ in range(100):
            time.sleep(0.01)
            with suppress(Exception):
                super().page_get(keys, into)
                return


@breaks(3)
class RemovesWhateverIsThere(FileBackend):
    """A check that fails removes what now stands there, not the page that was read."""

    def _read(self, i, key, segments, check):
        good = super()._read(i, key, segments, None)
        if good and check is not None and not check(i, segments):
            self.delete([key])
            return False
        return good


@breaks(11)
class ReadOnlyInNameOnly(FileBackend):
    def page_set(self, keys, pages):
        kept, self.capabilities = self.capabilities, replace(self.capabilities, read_only=False)
        try:
            return super().page_set(keys, pages)
        finally:
            self.capabilities = kept


@breaks(11)
class ReadOnlyRemovesDamage(FileBackend):
    def _read(self, i, key, segments, check):
        good = super()._read(i, key, segments, check)
        if not good:
            self._remove(key, None)
        return good


@breaks(8)
class JoinsTheBatchToSet(MemoryBackend):
    def page_set(self, keys, pages):
        joined = [(p[0], memoryview(b"".join(p[1:]))) for p in pages]
        return super().page_set(keys, joined)


@breaks(12)
class NoneMatchesNoHeader(MemoryBackend):
    def delete(self, keys, headers=None):
        if headers is not None:
            headers = [h if h is not None else b"" for h in headers]
        return super().delete(keys, headers)


@breaks(12)
class ScansByPrefix(MemoryBackend):
    def scan(self, place=None):
        return (key for key in super().scan() if key.startswith(place or ""))


@breaks(9)
class FoldsCase(_Renaming):
    @staticmethod
    def name(key):
        check_keys([key])
        return key.lower()


@breaks(9)
class FlattensNames(_Renaming):
    @staticmethod
    def name(key):
        check_keys([key])
        place, _, digits = key.rpartition("/")
        return f"x/kv/{place.replace('/', '-')[-64:]}/{digits}"


@breaks(9)
class CutsTheHash(_Renaming):
    @staticmethod
    def name(key):
        check_keys([key])
        return key[:-32] + "0" * 32


@breaks(8)
class HoldsOnToBuffers(MemoryBackend):
    def page_get(self, keys, into, check=None):
        self.__dict__.setdefault("seen", []).append([list(s) for s in into])
        return super().page_get(keys, into, check)


@breaks(4)
class SortsTheCallersKeys(MemoryBackend):
    def batch_exists(self, keys):
        found = super().batch_exists(keys)
        if isinstance(keys, list):
            keys.sort()
        return found


@breaks(4)
class TakesListsOnly(MemoryBackend):
    def exists_each(self, keys):
        return super().exists_each(keys.copy())


@breaks(11)
class FullForgetsWhatIsThere(MemoryBackend):
    """Counts only new pages as stored."""

    def page_set(self, keys, pages):
        there = [key in self._pages for key in keys]
        done = super().page_set(keys, pages)
        if not all(done) and not any(d and not t for d, t in zip(done, there, strict=True)):
            raise CapacityError("full", done=[False] * len(keys))
        return done


@breaks(7)
class UnreachableIsAbsentOneByOne(FileBackend):
    def exists_each(self, keys):
        try:
            return super().exists_each(keys)
        except BackendUnavailable:
            return [False] * len(keys)


@breaks(7)
class UnreachableHasNoHeaders(FileBackend):
    def headers(self, keys):
        try:
            return super().headers(keys)
        except BackendUnavailable:
            return [None] * len(keys)


@breaks(1)
class RewritesInPlace(FileBackend):
    """A page that is set again is cut and written anew under its name."""

    def _write(self, key, page):
        place, _, digits = key.rpartition("/")
        path = f"{self._folder.name}/pages/{place}/{digits[:2]}/{digits}"
        if os.path.exists(path):
            with open(path, "wb", buffering=0) as file:
                for piece in page:
                    file.write(piece)
            return True
        return super()._write(key, page)


@breaks(4)
class ChecksByRank(FileBackend):
    """Calls the check with the page's number among those found."""

    def page_get(self, keys, into, check=None):
        there = self.exists_each(keys)
        rank = {i: sum(there[:i]) for i in range(len(keys))}
        own = None if check is None else (lambda i, s: check(rank[i], s))
        return super().page_get(keys, into, own)


@breaks(12)
class ClaimsALengthAndRefuses(FileBackend):
    def page_set(self, keys, pages):
        sizes = {
            k.rpartition("/")[0]: sum(p.nbytes for p in s[1:])
            for k, s in zip(keys, pages, strict=True)
        }
        with self._call():
            for place, size in sizes.items():
                self._lengths.check(place, size, claim=True)
        return super().page_set(keys, pages)
