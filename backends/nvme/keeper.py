"""What must be done also when nobody calls: one thread an open store, about once a second."""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from l3store import page
from l3store.backends.nvme import journal
from l3store.backends.nvme.index import SLOT_BITS
from l3store.backends.nvme.journal import Entry
from l3store.backends.nvme.shelf import runs_of
from l3store.errors import L3Error

if TYPE_CHECKING:
    from l3store.backends.nvme.catalog import Catalog
    from l3store.backends.nvme.estate import Estate
    from l3store.backends.nvme.members import Members
    from l3store.backends.nvme.options import NvmeOptions
    from l3store.backends.nvme.reader import Reader
    from l3store.backends.nvme.segment import Segment

__all__ = ["Chores", "Keeper"]

_EVERY_SECONDS = 1.0
_SOON_SECONDS = 0.1


class Chores:
    """Takes in the peers' news, tells them what was read here, syncs, and scrubs."""

    def __init__(
        self,
        catalog: Catalog,
        estate: Estate,
        members: Members,
        reader: Reader,
        options: NvmeOptions,
    ) -> None:
        self._catalog, self._estate, self._members = catalog, estate, members
        self._reader, self._options = reader, options
        self._told_at = self._synced_at = time.monotonic()
        self._shelving = False

    def pause(self) -> float:
        """Returns the seconds until `do` is due again."""
        wait = _SOON_SECONDS if self._shelving or self._to_scrub() else _EVERY_SECONDS
        if self._options.durability == "interval":
            wait = min(wait, self._options.sync_interval)
        return wait

    def do(self) -> None:
        """Does what is due; blocks for the drive.

        Raises:
            OSError, BackendUnavailable: The store cannot be read or written.
        """
        now = time.monotonic()
        interval = self._options.durability == "interval"
        if interval and now - self._synced_at >= self._options.sync_interval:
            self._synced_at = now
            self.sync()
        if now - self._told_at >= _EVERY_SECONDS:
            self._told_at = now
            self.tell()
            with self._catalog.lock:
                self._members.mend()
                self._estate.look_after()
        if self._to_scrub():
            self._scrub()
        with self._catalog.lock:
            self._shelving = self._estate.shelve_one()

    def tell(self) -> None:
        """Takes in the news, and tells the peers what was read and counted here."""
        with self._catalog.lock:
            self._catalog.refresh()
            self._estate.free_retired()
            touched, self._reader.touched = self._reader.touched, set()
            entries = [
                Entry(journal.TOUCH, first >> SLOT_BITS, first & (1 << SLOT_BITS) - 1, count)
                for first, count in runs_of(sorted(touched))
                if (segment := self._catalog.segments.get(first >> SLOT_BITS)) is not None
                and not self._estate.owns(segment)
            ]
            if entries:
                self._estate.writer().journal.append(entries)
            for writer in self._members.mine.values():
                writer.journal.put_counters(list(self._reader.counts.values()))

    def sync(self) -> None:
        """Makes all that was written here survive a power cut."""
        with self._catalog.lock:
            segments = [segment for segment in self._estate.owned() if segment.needs_sync]
        failure: OSError | None = None
        for segment in segments:
            try:
                segment.sync()
            except OSError as error:  # the others are synced nevertheless
                failure = error
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Does at the end what nobody can do afterwards; what fails is left."""
        with suppress(OSError, L3Error):
            self.tell()
            if self._options.durability == "interval":
                self.sync()

    # -- after a power cut -------------------------------------------------------------------

    def _to_scrub(self) -> list[Segment]:
        if not self._options.scrub_rate:
            return []
        with self._catalog.lock:
            return [one for one in self._catalog.segments.values() if one.unproved]

    def _scrub(self) -> None:
        """Reads some unproved pages: the good ones exist from then on, the others are removed."""
        left = int(self._options.scrub_rate * _SOON_SECONDS)
        for segment in self._to_scrub():
            with self._catalog.lock:
                self._catalog.meet(segment.number)  # another process may have been through it
                count = max(1, left // segment.geometry.slot_bytes)
                hashes = [
                    value
                    for slot in sorted(segment.unproved)[:count]
                    if (value := segment.pages[slot]) is not None
                ]
            if hashes:
                left -= self._check(segment, hashes)
            with self._catalog.lock:
                if not segment.unproved:
                    self._proved(segment)
            if left <= 0:
                return

    def _check(self, segment: Segment, hashes: list[bytes]) -> int:
        length = segment.geometry.payload_bytes
        step = max(1, min(len(hashes), (4 << 20) // length))
        memory = memoryview(mmap.mmap(-1, step * segment.geometry.slot_bytes))
        into = page.frame([
            (memory[at : at + length],)
            for at in range(0, len(memory), segment.geometry.slot_bytes)
        ])  # fmt: skip
        for start in range(0, len(hashes), step):
            keys = [f"{segment.place}/{value.hex()}" for value in hashes[start : start + step]]
            self._reader.get(
                keys, into[: len(keys)], page.opener(keys), {segment.place: length}, repair=True
            )
        return len(hashes) * segment.geometry.slot_bytes

    def _proved(self, segment: Segment) -> None:
        """All its records are true: says so in its superblock, and to the peers."""
        if self._catalog.segments.get(segment.number) is not segment:
            return
        if segment.block.boot == self._catalog.boot:
            return
        writer = self._estate.writer()
        with self._members.locked():
            block = self._catalog.superblock(segment.number)
            if block is not None and block.identity == segment.identity:
                segment.put_superblock(replace(block, boot=self._catalog.boot))
        writer.journal.append([Entry(journal.OPEN, segment.number)])


class Keeper:
    """The thread. It does not keep a store alive that its user has forgotten."""

    def __init__(self, chores: Chores) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(chores), self._stop), name="l3store-nvme-keeper",
            daemon=True,
        )  # fmt: skip
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._stop.set()
        self._thread.join(5.0)


def _run(reference: weakref.ref[Chores], stop: threading.Event) -> None:
    wait = _SOON_SECONDS
    while not stop.wait(wait):
        chores = reference()
        if chores is None:
            return
        with suppress(OSError, L3Error):  # the next call says so to somebody who can act on it
            chores.do()
        wait = chores.pause()
        del chores
