"""The page header: 128 bytes in segment 0 that say what a page is and whether it is whole.

Little endian: magic 4, version u16, flags u16, payload length u64, place digest 16 (first half of
SHA-256 of ``<namespace>/<pool>/<shard>``), page hash 32, parent hash 32 (zero: first page), depth
u32, reserved 4 (zero), created u64 (ns since 1970), payload xxh3_64 u64, xxh3_64 of the first 120
bytes u64. It detects accidents (torn, stale, swapped, truncated, mixed pages), not an attacker who
can write to the store. docs/formats.md has golden vectors.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING

from xxhash import xxh3_64, xxh3_64_intdigest

from l3store.abc import META_MAX_BYTES
from l3store.errors import IntegrityError
from l3store.keys import FIRST_PAGE, check_keys, check_meta_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.abc import Check, Segments
    from l3store.keys import Chain

__all__ = [
    "HEADER_BYTES",
    "PARENT",
    "REASONS",
    "Header",
    "Opener",
    "check_batch",
    "check_headers",
    "check_meta",
    "frame",
    "frame_columns",
    "judged",
    "opener",
    "parse",
    "parse_of",
    "payload_bytes",
    "place_digest",
    "refusal",
    "seal",
    "stamp",
]

HEADER_BYTES = 128
MAGIC = b"L3PG"
VERSION = 1
PARENT = slice(64, 96)
"""Where the parent's hash stands in a header."""
PARENT_UNKNOWN = 1
DEPTH_UNKNOWN = 2
_KNOWN_FLAGS = PARENT_UNKNOWN | DEPTH_UNKNOWN
_SUMMED = 120
_PLACE_END = -65  # of a key: a slash and 64 digits follow

_nbytes = attrgetter("nbytes")
_layout = Struct("<4sHHQ16s32s32sI4xQQ")
_tail = Struct("<Q")
assert _layout.size == _SUMMED

REASONS = {
    "truncated": "fewer bytes than a header",
    "magic": "does not start as a page",
    "version": "written by a newer version",
    "header": "the header's own checksum does not hold",
    "flags": "has flags this version does not know",
    "place": "belongs to another namespace, pool or shard",
    "hash": "is the page of another key",
    "length": "has another payload length",
    "payload": "the payload's checksum does not hold",
}
"""Why a page was refused: the word for counters, and its meaning."""


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header whose own checksum held."""

    payload_bytes: int
    place_digest: bytes
    page_hash: bytes
    parent: bytes | None
    """None: unknown; `l3store.keys.FIRST_PAGE`: none."""
    depth: int | None
    created_ns: int
    payload_sum: int


@lru_cache(maxsize=4096)
def place_digest(place: str) -> bytes:
    """Returns the 16 bytes that name a place in headers."""
    return hashlib.sha256(place.encode("utf-8")).digest()[:16]


def payload_bytes(segments: Segments) -> int:
    """Returns the payload bytes of one page: all segments but the header."""
    if len(segments) == 2:
        return segments[1].nbytes
    if len(segments) == 3:  # K and V
        return segments[1].nbytes + segments[2].nbytes
    return sum(map(_nbytes, segments[1:]))


def check_batch(keys: Sequence[str], pages: Sequence[Segments]) -> dict[str, int]:
    """Accepts the arguments of `page_get` or `page_set`, before anything is done, or raises.

    Returns:
        The payload bytes of each place in the batch.

    Raises:
        ValueError: Unequal lengths, a key outside the grammar, a page without a 128-byte header
            segment, or two lengths in one place.
    """
    if len(keys) != len(pages):
        raise ValueError(f"{len(keys)} keys, but {len(pages)} pages")
    check_keys(keys)
    lengths: dict[str, int] = {}
    for key, page in zip(keys, pages, strict=True):
        if len(page) == 2:
            header, size = page[0].nbytes, page[1].nbytes
        else:
            header, size = (page[0].nbytes if page else 0), payload_bytes(page)
        if header != HEADER_BYTES:
            raise ValueError(f"segment 0 holds the header: {HEADER_BYTES} bytes, not {header}")
        place = key[:_PLACE_END]
        if lengths.setdefault(place, size) != size:
            raise ValueError(
                f"pages of one place have one length: {place} has {lengths[place]} payload bytes "
                f"in this batch, and {size}"
            )
    return lengths


def check_headers(
    keys: Sequence[str], headers: Sequence[bytes | None] | None
) -> Sequence[bytes | None]:
    """Returns what `delete` is to expect of each key's stored header.

    Raises:
        ValueError: Unequal lengths.
    """
    expected = [None] * len(keys) if headers is None else headers
    if len(expected) != len(keys):
        raise ValueError(f"{len(keys)} keys, but {len(expected)} headers")
    return expected


def check_meta(name: str, data: bytes) -> None:
    """Accepts the arguments of `put_meta`, or raises.

    Raises:
        ValueError: `name` is neither a namespace nor a place, or `data` is too long.
    """
    check_meta_name(name)
    if len(data) > META_MAX_BYTES:
        raise ValueError(f"{len(data)} bytes for {name!r}: at most {META_MAX_BYTES}")


def frame(payloads: Sequence[Sequence[memoryview]]) -> list[Segments]:
    """Returns `payloads` with room for a header before each, as `page_get` takes them.

    No copy: the payload pieces are used as they are, headers lie in one new buffer.
    """
    return [
        (header, *pieces) for header, pieces in zip(_room(len(payloads)), payloads, strict=True)
    ]


def frame_columns(columns: Sequence[Sequence[memoryview]], count: int) -> list[Segments]:
    """As `frame`, of `count` pages that are told by columns: column k holds piece k of each page.

    Faster where pages have many pieces: they are put together once.
    """
    return list(zip(_room(count), *columns, strict=True))


def _room(count: int) -> list[memoryview]:
    """Returns memory for the headers of `count` pages."""
    view = memoryview(bytearray(HEADER_BYTES * count))
    return [view[at : at + HEADER_BYTES] for at in range(0, len(view), HEADER_BYTES)]


def seal(
    place: str,
    chain: Chain,
    payloads: Sequence[Sequence[memoryview]],
    *,
    clock: Callable[[], int] = time.time_ns,
) -> list[Segments]:
    """Makes the header of each page, once, above the tiers: `frame`, then `stamp`.

    Args:
        place: Where the pages will be stored.
        chain: One link a page.
        payloads: The pieces of each page in host memory; contiguous, format ``B``.
        clock: Nanoseconds since 1970, read once a call.

    Returns:
        The pages as `page_set` takes them. No copy of payload; blocks for the checksum
        (about 50 us/MiB from memory).

    Raises:
        ValueError: Lengths differ, or a page has no payload.
    """
    pages = frame(payloads)
    stamp(place, chain, pages, clock=clock)
    return pages


def stamp(
    place: str,
    chain: Chain,
    pages: Sequence[Segments],
    *,
    length: int | None = None,
    clock: Callable[[], int] = time.time_ns,
) -> None:
    """Writes the header of each page of `frame` or `frame_columns` into its segment 0.

    Args:
        place: As of `seal`.
        chain: As of `seal`.
        pages: Whose headers are written.
        length: Payload bytes of each page, where the caller has cut them; None: they are counted.
        clock: As of `seal`.

    Raises:
        ValueError: As of `seal`. It blocks as that does.
    """
    if len(chain) != len(pages):
        raise ValueError(f"{len(chain)} pages in the chain, but {len(pages)} payloads")
    digest, now, unknown = place_digest(place), clock(), chain.depth is None
    flags = DEPTH_UNKNOWN if unknown else 0
    depth, parent = chain.depth or 0, chain.parent
    if parent is None:
        parent, flags = FIRST_PAGE, flags | PARENT_UNKNOWN
    pack, pack_tail, xxh3 = _layout.pack, _tail.pack, xxh3_64_intdigest
    for value, page in zip(chain.hashes, pages, strict=True):
        size = payload_bytes(page) if length is None else length
        if not size:
            raise ValueError(f"page {value.hex()} has no payload")
        # A stream over one piece would cost as much as all the rest.
        checksum = xxh3(page[1]) if len(page) == 2 else _sum(page[1:])
        start = pack(MAGIC, VERSION, flags, size, digest, value, parent, depth, now, checksum)
        page[0][:] = start + pack_tail(xxh3(start))
        parent = value
        if unknown:
            flags = DEPTH_UNKNOWN
        else:
            flags, depth = 0, depth + 1


def parse(data: bytes | memoryview) -> Header:
    """Reads a header from bytes that nobody vouches for; never looks past 128 bytes.

    Raises:
        IntegrityError: It is no whole header of a version known here; `.reason` says why.
    """
    data = bytes(data[:HEADER_BYTES])
    if len(data) < HEADER_BYTES:
        raise _refused("truncated")
    magic, version, flags, length, place, value, parent, depth, created, payload = (
        _layout.unpack_from(data)
    )
    if magic != MAGIC:
        raise _refused("magic")
    if version > VERSION:
        raise IntegrityError(
            f"page header of version {version}; this version reads up to {VERSION}",
            reason="version",
        )
    if _tail.unpack_from(data, _SUMMED)[0] != xxh3_64_intdigest(data[:_SUMMED]):
        raise _refused("header")
    if flags & ~_KNOWN_FLAGS or version < 1:
        raise _refused("flags")
    return Header(
        length, place, value, None if flags & PARENT_UNKNOWN else parent,
        None if flags & DEPTH_UNKNOWN else depth, created, payload,
    )  # fmt: skip


class Opener:
    """The check of one `page_get` call: is page i whole, and the page of key i?

    Thread-safe. `reasons` counts refusals by word.
    """

    __slots__ = ("_keys", "_place", "reasons")

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        # The last key's place with its slash, and its digest: most calls are about one place.
        # One tuple, as threads share it.
        self._place = ("/", b"")
        self.reasons: Counter[str] = Counter()

    def __call__(self, i: int, segments: Segments) -> bool:
        """Returns whether `segments` hold the page of key `i`; blocks for the checksum.

        Raises:
            ValueError: Segment 0 is not 128 bytes long: the caller's mistake, not the store's.
        """
        key, header = self._keys[i], segments[0]
        if header.nbytes != HEADER_BYTES:
            raise ValueError(f"segment 0 holds the header: 128 bytes, not {header.nbytes}")
        start, length, digest, value, checksum, header_checksum = _judged.unpack(header)
        place, expected = self._place
        if not key.startswith(place):
            place, expected = key[: _PLACE_END + 1], place_digest(key[:_PLACE_END])
            self._place = place, expected
        if (
            start in _STARTS
            and digest == expected
            and key.endswith(value.hex())
            and header_checksum == xxh3_64_intdigest(header[:_SUMMED])
        ):
            if len(segments) == 2:  # one piece in one go is faster than as a stream
                piece = segments[1]
                if length == piece.nbytes and checksum == xxh3_64_intdigest(piece):
                    return True
            elif length == payload_bytes(segments) and checksum == _sum(segments[1:]):
                return True
        self.reasons[refusal(key, segments) or "payload"] += 1
        return False

    def each(
        self,
        pages: Sequence[Segments],
        arrived: Sequence[bool],
        numbers: Sequence[int] | None = None,
    ) -> list[bool]:
        """Returns for each page whether it arrived and is good; blocks for the checksums.

        The same as calling for each page that arrived, but while all is well the headers are
        judged together: half the cost a page, and less where payloads drive all else from caches.

        Args:
            pages: To be judged.
            arrived: Whether they came at all, one a page.
            numbers: Which of the keys they are for; None: all keys, in order.

        Raises:
            ValueError: A segment 0 is not 128 bytes long.
        """
        if numbers is None:
            numbers = range(len(self._keys))
        keys = [self._keys[i] for i in numbers]
        if _all_good([*compress(keys, arrived)], [*compress(pages, arrived)]):
            return list(arrived)
        return [
            came and self(i, page) for i, page, came in zip(numbers, pages, arrived, strict=True)
        ]


def judged(
    check: Check,
    pages: Sequence[Segments],
    arrived: Sequence[bool],
    numbers: Sequence[int],
) -> list[bool]:
    """Returns for each page whether it arrived and passes `check`; arguments as of `Opener.each`.

    For whoever calls the check of a `page_get`.
    """
    if isinstance(check, Opener):
        return check.each(pages, arrived, numbers)
    return [came and check(i, page) for i, page, came in zip(numbers, pages, arrived, strict=True)]


def opener(keys: Sequence[str]) -> Opener:
    """Returns the check for a `page_get` of `keys`."""
    return Opener(keys)


# A version-1 header as `Opener` reads it: magic to flags, length, place digest, page hash, and both
# checksums; parent, depth and time are covered by the header's checksum.
_judged = Struct("<8sQ16s32s48xQQ")
_summed = Struct("<120s8x")
_STARTS = frozenset(
    Struct("<4sHH").pack(MAGIC, VERSION, flags) for flags in range(_KNOWN_FLAGS + 1)
)


def _all_good(keys: Sequence[str], pages: Sequence[Segments]) -> bool:
    """Returns whether these are the whole pages of `keys`, all of one place.

    Payloads come last, in loops that only sum them: while a payload is read, the caches lose what
    the interpreter needs for anything else. So pages of one piece, or K and V, have their own.
    """
    headers = b"".join([segments[0] for segments in pages])
    if not pages or len(headers) != HEADER_BYTES * len(pages):
        return False
    starts, lengths, digests, values, sums, header_sums = zip(
        *_judged.iter_unpack(headers), strict=True
    )
    place = keys[0][:_PLACE_END]
    named = b"".join(values).hex("|", 32).replace("|", f"|{place}/")
    if not (
        _STARTS.issuperset(starts)
        and digests.count(place_digest(place)) == len(pages)
        and f"{place}/{named}" == "|".join(keys)
        and [xxh3_64_intdigest(start) for (start,) in _summed.iter_unpack(headers)]
        == list(header_sums)
    ):
        return False
    widths = set(map(len, pages))
    if widths == {2}:
        pieces = [segments[1] for segments in pages]
        return [piece.nbytes for piece in pieces] == list(lengths) and (
            [xxh3_64_intdigest(piece) for piece in pieces] == list(sums)
        )
    if widths != {3}:
        return [payload_bytes(segments) for segments in pages] == list(lengths) and (
            [_sum(segments[1:]) for segments in pages] == list(sums)
        )
    if [first.nbytes + second.nbytes for _, first, second in pages] != list(lengths):
        return False
    found = []
    for _, first, second in pages:
        state = xxh3_64(first)
        state.update(second)
        found.append(state.intdigest())
    return found == list(sums)


def parse_of(key: str, data: bytes | memoryview, length: int) -> Header:
    """Reads a header as `parse` does, and only takes that of `key` with `length` payload bytes.

    Raises:
        IntegrityError: It is another one, or none; `.reason` is the first that a reader can know.
    """
    header = parse(data)
    place, _, digits = key.rpartition("/")
    if header.place_digest != place_digest(place):
        raise _refused("place")
    if header.page_hash != bytes.fromhex(digits):
        raise _refused("hash")
    if header.payload_bytes != length:
        raise _refused("length")
    return header


def refusal(key: str, segments: Segments) -> str | None:
    """Returns why `segments` are not the page of `key` (one of `REASONS`), or None if they are.

    For tools and counters; `Opener` is the fast way.
    """
    try:
        header = parse_of(key, segments[0], payload_bytes(segments))
    except IntegrityError as error:
        return error.reason
    return None if header.payload_sum == _sum(segments[1:]) else "payload"


def _sum(pieces: Sequence[memoryview]) -> int:
    """Returns one streaming xxh3_64 over all pieces: cutting a page differently changes nothing."""
    state = xxh3_64()
    for _ in map(state.update, pieces):  # layer-first pools have hundreds
        pass
    return state.intdigest()


def _refused(reason: str) -> IntegrityError:
    return IntegrityError(f"not a page: {REASONS[reason]}", reason=reason)
