"""What is stored, as all writers tell it: slot tables at the start, journals from then on.

Every call begins with `refresh`, which reads what the peers' journals tell since the last one, so
that a page is seen as soon as its writer's call has returned.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from l3store.backends.nvme import journal
from l3store.backends.nvme.format import (
    SUPERBLOCK_BYTES,
    Superblock,
    boot_id,
    live_pages,
    record_holds,
)
from l3store.backends.nvme.index import SLOT_BITS, Index
from l3store.backends.nvme.segment import Files, Segment, segment_name
from l3store.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from l3store.backends.nvme.journal import Entry
    from l3store.backends.nvme.members import Members

__all__ = ["Catalog", "segment_numbers"]

_READ_AGAIN_SECONDS = 1.0
_NO_SEGMENT = (errno.ENOENT, errno.ELOOP, errno.ESPIPE)  # nothing, a link, a FIFO


class Catalog(Index):
    """An index that follows the drive and the peers. Guarded by `lock`."""

    def __init__(self, files: Files, members: Members, segment_bytes: int) -> None:
        super().__init__(files)
        self.boot = boot_id()
        self.segment_bytes = segment_bytes
        self.members = members
        self.on_touch: Callable[[Segment, Iterable[int]], None] = lambda _segment, _slots: None
        """Called for slots whose page somebody else has read."""
        self.on_read_again: Callable[[Segment], None] = lambda _segment: None
        """Called for own segments of the `unread`."""
        self.unread: set[int] = set()
        """Segments that could not be read when there was something new in them."""
        self._read_at = 0.0  # when to try them again
        self._lost: set[bytes] = set()  # peers of whose news some are lost

    # -- segments ----------------------------------------------------------------------------

    def _read_superblock(self, number: int) -> Superblock:
        """Reads what segment `number` says of itself.

        Raises:
            OSError: It cannot be read.
            IntegrityError: It is no segment of that number.
        """
        file = os.open(
            segment_name(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
            dir_fd=self._files.folder,
        )  # fmt: skip
        try:
            data = os.pread(file, SUPERBLOCK_BYTES, 0)
        finally:
            os.close(file)
        return Superblock.parse(data, number, self.segment_bytes)

    def superblock(self, number: int) -> Superblock | None:
        """Reads what segment `number` says of itself; None where there is none that holds."""
        try:
            block = self._read_superblock(number)
        except OSError as error:
            self._could_not_read(number, error)
            return None
        except IntegrityError:
            return None
        known = self.places.get(block.place)
        if known is not None and known.payload_bytes != block.geometry.payload_bytes:
            return None  # two lengths in one place: the one that was there first counts
        return block

    def _could_not_read(self, number: int, error: OSError) -> None:
        if error.errno not in _NO_SEGMENT:
            self.unread.add(number)

    def is_dead(self, number: int, identity: bytes = b"") -> bool:
        """Returns whether what has a segment's name surely is none (or not that of `identity`).

        What cannot be read just now may be one, and a folder is nobody's.
        """
        try:
            found = self._read_superblock(number).identity
        except OSError as error:
            return error.errno in _NO_SEGMENT
        except IntegrityError:
            return True
        return identity not in (b"", found)

    def meet(self, number: int) -> Segment | None:
        """Returns segment `number` as it stands on the drive now, taken in where it is new."""
        known, block = self.segments.get(number), self.superblock(number)
        if block is None:
            return known
        if known is not None and known.identity == block.identity:
            if known.block.boot != block.boot and block.boot == self.boot:
                for slot in list(known.unproved):
                    self.prove(known, slot)
            known.block = block
            return known
        return self.install(block)

    def try_load(self, segment: Segment) -> None:
        """As `load`; what cannot be read now is `unread`."""
        try:
            self.load(segment)
        except OSError as error:
            self._could_not_read(segment.number, error)

    def load(self, segment: Segment) -> None:
        """Reads a segment's table anew and makes the index agree with it."""
        live, place = self.live(segment), self.places[segment.place]
        proved = segment.block.durable or segment.block.boot == self.boot
        pages, number = segment.pages, segment.number << SLOT_BITS
        if proved and not any(pages):  # a fresh start: the same without the questions
            index = place.pages
            for slot, value, _ in live:
                pages[slot] = value
                if index.setdefault(value, number | slot) != number | slot:
                    place.doubles.setdefault(value, []).append(number | slot)
            return
        self._take_out_gone(segment, {slot for slot, _, _ in live})
        for slot, value, _ in live:
            if pages[slot] != value:
                self.add(segment, slot, value, proved=proved)

    def live(self, segment: Segment) -> list[tuple[int, bytes, int]]:
        """Reads a segment's table: (slot, page hash, generation) of each page in it."""
        table, place = segment.read_records(0, segment.geometry.slots), self.places[segment.place]
        return live_pages(table, place.digest, place.payload_bytes)

    def _take_out_gone(self, segment: Segment, there: Collection[int]) -> None:
        """Forgets the pages in slots whose records are not live any more."""
        gone = [
            slot
            for slot, value in enumerate(segment.pages)
            if value is not None and slot not in there
        ]
        for slot in gone:
            self.remove(segment, slot)
        if gone:
            self.on_gone(segment, gone)

    def load_all(self) -> None:
        """Reads all segments of the folder, in order of their numbers."""
        for number in segment_numbers(self._files.folder):
            segment = self.meet(number)
            if segment is not None:
                self.try_load(segment)

    # -- peers -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Takes in what all peers' journals tell since the last call: 0.7 us a peer if nothing.

        Raises:
            OSError: The folder of writers cannot be read.
        """
        for peer, entries in self.members.news():
            if entries is None:
                self._lost.add(peer)
            else:
                self.apply(entries)
        for peer in list(self._lost):
            self._reload(peer)
            self._lost.discard(peer)
        if self.unread and time.monotonic() >= self._read_at:
            self._read_at = time.monotonic() + _READ_AGAIN_SECONDS
            self._read_again()

    def _read_again(self) -> None:
        unread, self.unread = self.unread, set()
        for number in unread:
            segment = self.meet(number)
            if segment is None:
                continue
            if segment.block.writer in self.members.mine:
                self.on_read_again(segment)
            else:
                self.try_load(segment)

    def _reload(self, peer: bytes) -> None:
        for number in segment_numbers(self._files.folder):
            segment = self.meet(number)
            if segment is None:
                continue
            if segment.block.writer == peer:
                self.try_load(segment)
            elif segment.block.writer in self.members.mine:  # it may have dropped pages there
                try:
                    self._take_out_gone(segment, {slot for slot, _, _ in self.live(segment)})
                except OSError as error:
                    self._could_not_read(number, error)

    def apply(self, entries: Iterable[Entry]) -> None:
        """Makes the index agree with what a journal tells, in its order."""
        for entry in entries:
            kind, segment = entry.kind, self.segments.get(entry.segment)
            if kind in (journal.OPEN, journal.LOAD):
                segment = self.meet(entry.segment)
                if segment is not None and kind == journal.LOAD:
                    self.try_load(segment)
                continue
            if kind == journal.PUT and segment is None:
                segment = self.meet(entry.segment)
            if segment is None or entry.slot + entry.length > segment.geometry.slots:
                continue
            slots = range(entry.slot, entry.slot + entry.length)
            if kind == journal.PUT:
                self._put(segment, entry)
            elif kind == journal.DEL:
                for slot in slots:
                    self.remove(segment, slot)
            elif kind == journal.DROP:
                self._dropped(segment, entry)
            elif kind == journal.TOUCH:
                self.on_touch(segment, slots)
            elif kind == journal.CLOSE and segment.tag == entry.generation:
                self.drop(segment)

    def _put(self, segment: Segment, entry: Entry) -> None:
        """Slots were filled: a look at the table tells with what."""
        try:
            table = segment.read_records(entry.slot, entry.length)
        except OSError as error:  # if it is gone meanwhile, its CLOSE will come
            self._could_not_read(segment.number, error)
            return
        place = self.places[segment.place]
        for at, value, generation in live_pages(table, place.digest, place.payload_bytes):
            if generation == entry.generation + at:
                self.add(segment, entry.slot + at, value)

    def _dropped(self, segment: Segment, entry: Entry) -> None:
        with suppress(OSError):
            record = segment.read_records(entry.slot, 1)
            if record_holds(record):
                if record_generation(record) != entry.generation:
                    return  # filled anew since
                if segment.block.writer in self.members.mine:  # in case the other is killed over it
                    segment.clear_if(entry.slot, record)
        if self.remove(segment, entry.slot):
            self.on_gone(segment, [entry.slot])


def segment_numbers(folder: int) -> list[int]:
    """Returns the numbers of the segment files in a folder, in order; foreign names are passed."""
    numbers = []
    for name in os.listdir(folder):
        digits = name.removeprefix("seg-")
        if digits != name and digits.isdigit() and segment_name(int(digits)) == name:
            numbers.append(int(digits))
    return sorted(numbers)


def record_generation(record: bytes) -> int:
    """Returns the generation that a record names."""
    return int.from_bytes(record[128:136], "little")
