"""``memory://``: pages in this process's memory. The reference that the contract is read by.

With ``evict=lru`` (the default) a full store drops what was used longest ago, and of one chain the
end first: pages are touched from the end to the start, so a parent always outlives its children.
With ``evict=none`` it refuses further pages.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Literal

import msgspec

from l3store.abc import Backend, Capabilities, Check, PlaceUsage, Segments
from l3store.calls import Gate
from l3store.config import Size, StoreURL, load_options
from l3store.errors import CapacityError, ConfigError, IntegrityError
from l3store.keys import FIRST_PAGE, check_keys, check_meta_name, check_place
from l3store.page import HEADER_BYTES, check_batch, check_headers, check_meta, parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MemoryBackend", "MemoryOptions"]


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``memory://``."""

    capacity: Size = Size(8 << 30)
    """Bytes of all pages, headers included."""
    evict: Literal["lru", "none"] = "lru"


class MemoryBackend(Backend):
    """Pages as one `bytes` object each, in a dict that also is the order of eviction."""

    capabilities = Capabilities(listing=True, delete=True, headers=True, interruptible=True)

    def __init__(self, options: MemoryOptions | None = None) -> None:
        self._options = options or MemoryOptions()
        if self._options.capacity <= HEADER_BYTES:
            raise ConfigError(
                f"option 'capacity': {self._options.capacity} bytes hold no page; "
                f"the least is one page and its {HEADER_BYTES} header bytes"
            )
        self._gate = Gate("memory store")
        self._lock = Lock()
        self._pages: OrderedDict[str, bytes] = OrderedDict()  # used longest ago first
        self._parents: dict[str, str | None] = {}
        self._used = 0
        self._lengths: dict[str, int] = {}  # payload bytes of each place
        self._meta: dict[str, bytes] = {}

    @classmethod
    def from_url(cls, url: StoreURL) -> MemoryBackend:
        """Opens a new, empty store: two opens share nothing.

        Raises:
            ConfigError: An option is wrong, or the URL names a host or path.
        """
        if url.host or url.path.strip("/"):
            raise ConfigError(f"{url} names a place, but memory:// has none: use memory://")
        return cls(load_options(MemoryOptions, "memory", url.options))

    def batch_exists(self, keys: Sequence[str]) -> int:  # noqa: D102 - as in Backend
        check_keys(keys)
        with self._gate, self._lock:
            return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    def exists_each(self, keys: Sequence[str]) -> list[bool]:  # noqa: D102
        check_keys(keys)
        with self._gate, self._lock:
            return [key in self._pages for key in keys]

    def page_get(  # noqa: D102
        self, keys: Sequence[str], into: Sequence[Segments], check: Check | None = None
    ) -> list[bool]:
        lengths = check_batch(keys, into)
        with self._gate:
            with self._lock:
                self._check_lengths(lengths)
                found = [self._pages.get(key) for key in keys]
                self._touch(keys)
            # Pages are immutable, so the copying needs no lock.
            return [
                self._copy(key, data, segments)
                for key, data, segments in zip(keys, found, into, strict=True)
            ]

    def page_set(self, keys: Sequence[str], pages: Sequence[Segments]) -> list[bool]:  # noqa: D102
        lengths = check_batch(keys, pages)
        with self._gate:
            with self._lock:
                self._check_lengths(lengths)
                self._lengths.update(lengths)
                if keys:
                    self._touch_ancestors(_parent(keys[0], pages[0]))  # or room is made of them
            # From the end to the start: if not all fit, the start of the chain is what stays.
            for key, page in zip(reversed(keys), reversed(pages), strict=True):
                data, parent = b"".join(page), _parent(key, page)
                with self._lock:
                    self._store(key, data, parent)
            with self._lock:
                done = [key in self._pages for key in keys]
                self._touch(keys)
        if keys and not any(done):
            raise CapacityError(
                f"memory store of {self._options.capacity} bytes is full", done=done
            )
        return done

    def put_meta(self, name: str, data: bytes) -> None:  # noqa: D102
        check_meta(name, data)
        with self._gate, self._lock:
            self._meta[name] = bytes(data)

    def get_meta(self, name: str) -> bytes | None:  # noqa: D102
        check_meta_name(name)
        with self._gate, self._lock:
            return self._meta.get(name)

    def list_meta(self) -> list[str]:  # noqa: D102
        with self._gate, self._lock:
            return sorted(self._meta)

    def scan(self, place: str | None = None) -> Iterator[str]:  # noqa: D102
        prefix = "" if place is None else check_place(place) + "/"
        with self._gate, self._lock:
            keys = list(self._pages)
        return (key for key in keys if key.startswith(prefix))

    def usage(self) -> list[PlaceUsage]:  # noqa: D102
        counts: dict[str, int] = {}
        for key in self.scan():
            place = key.rpartition("/")[0]
            counts[place] = counts.get(place, 0) + 1
        return [
            PlaceUsage(
                place, count, count * self._lengths[place],
                count * (self._lengths[place] + HEADER_BYTES),
            )
            for place, count in sorted(counts.items())
        ]  # fmt: skip

    def delete(  # noqa: D102
        self, keys: Sequence[str], headers: Sequence[bytes | None] | None = None
    ) -> list[bool]:
        check_keys(keys)
        expected = check_headers(keys, headers)
        with self._gate, self._lock:
            return [
                self._drop(key)
                if key in self._pages
                and (header is None or self._pages[key][:HEADER_BYTES] == header)
                else False
                for key, header in zip(keys, expected, strict=True)
            ]

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:  # noqa: D102
        check_keys(keys)
        with self._gate, self._lock:
            return [self._pages[key][:HEADER_BYTES] if key in self._pages else None for key in keys]

    def health(self) -> None:  # noqa: D102
        with self._gate:
            pass

    def close(self) -> None:  # noqa: D102
        if self._gate.shut(seconds=5.0):
            self._pages.clear()
            self._parents.clear()
            self._meta.clear()

    # -- inside the lock -------------------------------------------------------------------

    def _check_lengths(self, lengths: dict[str, int]) -> None:
        for place, length in lengths.items():
            known = self._lengths.get(place, length)
            if known != length:
                raise ValueError(
                    f"pages of {place} have {known} payload bytes in this store, not {length}"
                )

    def _store(self, key: str, data: bytes, parent: str | None) -> None:
        if key in self._pages:
            return  # any whole page of a key is as good as another
        if len(data) > self._options.capacity:
            return  # no room can be made for it, so none is
        while self._used + len(data) > self._options.capacity:
            if self._options.evict == "none" or not self._pages:
                return
            self._drop(next(iter(self._pages)))
        self._pages[key] = data
        self._parents[key] = parent
        self._used += len(data)

    def _drop(self, key: str) -> bool:
        self._used -= len(self._pages.pop(key))
        self._parents.pop(key, None)
        return True

    def _touch(self, keys: Sequence[str]) -> None:
        """Marks a run of a chain as just used, then all pages before it, the first page last."""
        for key in reversed(keys):
            if key in self._pages:
                self._pages.move_to_end(key)
        if keys:
            self._touch_ancestors(self._parents.get(keys[0]))

    def _touch_ancestors(self, key: str | None) -> None:
        seen = set()  # headers may lie: a cycle must end, too
        while key is not None and key in self._pages and key not in seen:
            seen.add(key)
            self._pages.move_to_end(key)
            key = self._parents.get(key)

    def _copy(self, key: str, data: bytes | None, segments: Segments) -> bool:
        if data is None:
            return False
        if len(data) != sum([piece.nbytes for piece in segments]):
            # All pages of the place have the caller's length, so this one is damaged.
            with self._lock:
                if self._pages.get(key) is data:
                    self._drop(key)
            return False
        view, at = memoryview(data), 0
        for piece in segments:
            piece[:] = view[at : at + piece.nbytes]
            at += piece.nbytes
        return True


def _parent(key: str, page: Segments) -> str | None:
    """The key of the page before, None where there is none or the header does not tell."""
    try:
        parent = parse(page[0]).parent
    except IntegrityError:
        return None
    return None if parent in (None, FIRST_PAGE) else f"{key.rpartition('/')[0]}/{parent.hex()}"
