"""Harm to stored pages, done behind the store's back in the files they lie in.

Nothing here knows the format of a store: a page is found by its bytes, as the store itself returns
them, wherever they stand in the store's files.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from l3store import page, registry
from l3store.page import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["HARMS", "Harm", "Lying", "pages_in"]


class Lying(NamedTuple):
    """One stored page: where its header and its payload lie, and what they are."""

    header_at: tuple[Path, int]
    payload_at: tuple[Path, int]
    header: bytes
    payload: bytes


def pages_in(url: str, root: Path) -> list[Lying]:
    """Returns the pages of the one chain that a store below `root` holds, from its start on."""
    with closing(registry.open(f"{url}{'&' if '?' in url else '?'}mode=ro", raw=True)) as store:
        keys = list(store.scan())
        headers = [page.parse(header) for header in store.headers(keys)]
        after = {h.parent: (key, h) for key, h in zip(keys, headers, strict=True)}
        hashes = {header.page_hash for header in headers}
        (end,) = [parent for parent in after if parent not in hashes]
        found = []
        while end in after:
            key, header = after[end]
            room = [bytearray(HEADER_BYTES), bytearray(header.payload_bytes)]
            assert store.page_get([key], [[memoryview(piece) for piece in room]]) == [True]
            found.append([bytes(piece) for piece in room])
            end = header.page_hash
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return [Lying(_find(files, h), _find(files, p), h, p) for h, p in found]


def _find(files: dict[Path, bytes], data: bytes) -> tuple[Path, int]:
    (hit,) = [(path, at) for path, text in files.items() if (at := text.find(data)) >= 0]
    return hit


def _write(at: tuple[Path, int], data: bytes) -> None:
    with at[0].open("r+b") as file:
        file.seek(at[1])
        file.write(data)


def _put_payload(one: Lying, data: bytes) -> None:
    _write(one.payload_at, data)


def _swap_payloads(pages: Sequence[Lying], i: int, k: int) -> None:
    _put_payload(pages[i], pages[k].payload)
    _put_payload(pages[k], pages[i].payload)


def _flip(one: Lying, byte: int) -> None:
    data = bytearray(one.payload)
    data[byte] ^= 0x10
    _put_payload(one, bytes(data))


def _swap_whole(pages: Sequence[Lying], i: int, k: int) -> None:
    _swap_payloads(pages, i, k)
    _write(pages[i].header_at, pages[k].header)
    _write(pages[k].header_at, pages[i].header)


def _zero_all(pages: Sequence[Lying]) -> None:
    for one in pages:
        _put_payload(one, bytes(len(one.payload)))


def _tear(one: Lying, other: Lying) -> None:
    half = len(one.payload) // 2
    _put_payload(one, one.payload[:half] + other.payload[half:])


def _cut(one: Lying) -> None:
    """Cuts off the end of the file, from the middle of this page on."""
    path, at = one.payload_at
    with path.open("r+b") as file:
        file.truncate(at + len(one.payload) // 2)


class Harm(NamedTuple):
    """What is done to the pages of a prefix, and the first page that it spoils."""

    first: int
    do: Callable[[Sequence[Lying]], None]


HARMS = {
    "a bit of the first payload": Harm(0, lambda pages: _flip(pages[0], 0)),
    "the last bit of a payload": Harm(20, lambda pages: _flip(pages[20], -1)),
    "all payloads zeroed": Harm(0, _zero_all),
    "a payload zeroed": Harm(9, lambda pages: _put_payload(pages[9], bytes(len(pages[9].payload)))),
    "two payloads swapped": Harm(12, lambda pages: _swap_payloads(pages, 12, 30)),
    "two pages swapped": Harm(5, lambda pages: _swap_whole(pages, 5, 6)),
    "half a payload of another page": Harm(17, lambda pages: _tear(pages[17], pages[3])),
    "a header zeroed": Harm(2, lambda pages: _write(pages[2].header_at, bytes(HEADER_BYTES))),
    "a file cut": Harm(0, lambda pages: _cut(pages[0])),
}
