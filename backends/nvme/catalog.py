"""What is stored where, as this process knows it: an index over all writers' slot tables.

Every call begins with `refresh`, which reads what the peers' journals tell since the last one, so
that a page is seen as soon as its writer's call has returned.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from l3store import page
from l3store.backends.nvme import journal
from l3store.backends.nvme.format import (
    SUPERBLOCK_BYTES,
    Superblock,
    boot_id,
    live_pages,
    record_holds,
)
from l3store.backends.nvme.segment import Files, Segment, segment_name
from l3store.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from l3store.backends.nvme.journal import Entry
    from l3store.backends.nvme.members import Members

__all__ = ["SLOT_BITS", "At", "Catalog", "Place"]

_READ_AGAIN_SECONDS = 1.0
SLOT_BITS = 20
_SLOT = (1 << SLOT_BITS) - 1


class At(NamedTuple):
    """Where a page lies."""

    segment: Segment
    slot: int


class Place:
    """The pages of one place; guarded by the store's lock."""

    __slots__ = ("digest", "doubles", "name", "pages", "payload_bytes", "segments", "unproved")

    def __init__(self, name: str, payload_bytes: int) -> None:
        self.name, self.payload_bytes = name, payload_bytes
        self.digest = page.place_digest(name)
        self.pages: dict[bytes, int] = {}
        """Page hash -> segment number << 20 | slot."""
        self.unproved: dict[bytes, int] = {}
        """The same for pages that must be read before anybody is told that they exist."""
        self.doubles: dict[bytes, list[int]] = {}
        """Second copies that another writer stored at the same moment."""
        self.segments = 0


class Catalog:
    """The index of one open store. Guarded by `lock`, but for what says otherwise."""

    def __init__(self, files: Files, members: Members, segment_bytes: int) -> None:
        self.lock = threading.Lock()
        self.places: dict[str, Place] = {}
        self.segments: dict[int, Segment] = {}
        self.boot = boot_id()
        self.segment_bytes = segment_bytes
        self.members = members
        self.on_gone: Callable[[Segment, list[int]], None] = lambda _segment, _slots: None
        """Called for slots of which somebody else removed the page."""
        self.on_touch: Callable[[Segment, Iterable[int]], None] = lambda _segment, _slots: None
        """Called for slots whose page somebody else has read."""
        self.on_read_again: Callable[[Segment], None] = lambda _segment: None
        """Called for own segments of the `unread`."""
        self.unread: set[int] = set()
        """Segments that could not be read when there was something new in them."""
        self._read_at = 0.0  # when to try them again
        self._lost: set[bytes] = set()  # peers of whose news some are lost
        self._files = files

    # -- looking up --------------------------------------------------------------------------

    def at(self, location: int) -> At:
        """Returns the segment and slot that an index value means."""
        return At(self.segments[location >> SLOT_BITS], location & _SLOT)

    def found(
        self, stretches: Iterable[tuple[str, Sequence[bytes]]], *, unproved: bool = False
    ) -> list[int | None]:
        """Returns where each page lies.

        Args:
            stretches: Places and page hashes, as `keys.split_keys` gives them.
            unproved: Also of pages that nobody has checked.
        """
        found: list[int | None] = []
        for name, hashes in stretches:
            place = self.places.get(name)
            if place is None:
                found += [None] * len(hashes)
                continue
            here = list(map(place.pages.get, hashes))
            if unproved and place.unproved:
                doubtful = place.unproved.get
                pairs = zip(here, hashes, strict=True)
                here = [at if at is not None else doubtful(value) for at, value in pairs]
            found += here
        return found

    def check_lengths(self, lengths: Mapping[str, int]) -> None:
        """Checks the payload bytes of places against what is stored there.

        Raises:
            ValueError: Pages of one of them have another length in this store.
        """
        for name, length in lengths.items():
            place = self.places.get(name)
            if place is not None and place.payload_bytes != length:
                raise ValueError(
                    f"pages of {name} have {place.payload_bytes} payload bytes in this store, "
                    f"not {length}"
                )

    # -- changes -----------------------------------------------------------------------------

    def add(self, segment: Segment, slot: int, value: bytes, *, proved: bool = True) -> None:
        """A page lies in a slot."""
        if segment.pages[slot] is not None:
            self.remove(segment, slot)
        segment.pages[slot] = value
        place, location = self.places[segment.place], segment.number << SLOT_BITS | slot
        if not proved:
            segment.unproved.add(slot)
        table = place.pages if proved else place.unproved
        if table.setdefault(value, location) != location:
            place.doubles.setdefault(value, []).append(location)

    def remove(self, segment: Segment, slot: int) -> bool:
        """No page lies in a slot any more; a second copy takes its place. Returns if one did."""
        value = segment.pages[slot]
        if value is None:
            return False
        segment.pages[slot] = None
        proved = slot not in segment.unproved
        segment.unproved.discard(slot)
        place, location = self.places[segment.place], segment.number << SLOT_BITS | slot
        table = place.pages if proved else place.unproved
        doubles = place.doubles.get(value)
        if doubles and location in doubles:
            doubles.remove(location)
        elif table.get(value) == location:
            del table[value]
            if doubles:
                other, slot = self.at(doubles.pop())
                other.pages[slot] = None
                self.add(other, slot, value, proved=slot not in other.unproved)
        if doubles == []:
            place.doubles.pop(value, None)
        return True

    def prove(self, segment: Segment, slot: int) -> None:
        """The page in a slot was read and is whole."""
        if slot not in segment.unproved:
            return
        value = segment.pages[slot]
        self.remove(segment, slot)
        if value is not None:
            self.add(segment, slot, value)

    # -- segments ----------------------------------------------------------------------------

    def install(self, block: Superblock) -> Segment:
        """Takes a segment in, without its pages; what had its number before is gone."""
        old = self.segments.get(block.number)
        if old is not None:
            self.drop(old)
        segment = self.segments[block.number] = Segment(block, self._files)
        place = self.places.get(block.place)
        if place is None:
            place = self.places[block.place] = Place(block.place, block.geometry.payload_bytes)
        place.segments += 1
        return segment

    def drop(self, segment: Segment) -> None:
        """A segment and all pages in it are gone."""
        slots = [slot for slot, value in enumerate(segment.pages) if value is not None]
        for slot in slots:
            self.remove(segment, slot)
        if self.segments.get(segment.number) is segment:
            del self.segments[segment.number]
        place = self.places[segment.place]
        place.segments -= 1
        if not place.segments:
            del self.places[segment.place]
        self._files.forget(segment)
        self.on_gone(segment, slots)

    def superblock(self, number: int) -> Superblock | None:
        """Reads what segment `number` says of itself; None where there is none that holds."""
        try:
            file = os.open(
                segment_name(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
                dir_fd=self._files.folder,
            )  # fmt: skip
        except OSError as error:
            self._could_not_read(number, error)
            return None
        try:
            data = os.pread(file, SUPERBLOCK_BYTES, 0)
            block = Superblock.parse(data, number, self.segment_bytes)
        except OSError as error:
            self._could_not_read(number, error)
            return None
        except IntegrityError:
            return None
        finally:
            os.close(file)
        known = self.places.get(block.place)
        if known is not None and known.payload_bytes != block.geometry.payload_bytes:
            return None  # two lengths in one place: the one that was there first counts
        return block

    def _could_not_read(self, number: int, error: OSError) -> None:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ESPIPE):
            self.unread.add(number)

    def is_dead(self, number: int, identity: bytes = b"") -> bool:
        """Returns whether what has a segment's name surely is none (or not that of `identity`).

        What cannot be read just now may be one, and a folder is nobody's.
        """
        try:
            file = os.open(
                segment_name(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
                dir_fd=self._files.folder,
            )  # fmt: skip
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ELOOP)
        try:
            data = os.pread(file, SUPERBLOCK_BYTES, 0)
            found = Superblock.parse(data, number, self.segment_bytes).identity
        except IntegrityError:
            return True
        except OSError as error:
            return error.errno == errno.ESPIPE
        finally:
            os.close(file)
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
