"""Page hashes, chained over the prefix: equal hashes mean equal whole prefixes.

    seed      = SHA-256("l3store.seed.1" + frame(lora) + frame(salt))
    hash of a = SHA-256("l3store.page.1" + hash of the page before (or the seed)
                        + u64 token count + tokens as u64, little endian)

The seed stands before the first page in place of a hash, so prompts under another LoRA adapter or
another tenant's salt never share a page. Engines that bring hashes of their own use
`Chain.from_hex` instead.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from l3store.keys._framing import frame
from l3store.keys.grammar import check_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["FIRST_PAGE", "HASH_BYTES", "Chain", "Link", "page_hash", "seed"]

HASH_BYTES = 32
_DEPTHS = 1 << 32  # a header has 32 bits for it
FIRST_PAGE = bytes(HASH_BYTES)
"""The parent of a first page."""

Link = tuple[bytes, bytes | None, int | None]
"""(page hash, parent hash, depth) of one page; None where unknown."""


def seed(lora: str | None = None, salt: str | None = None) -> bytes:
    """Returns the 32 bytes that stand before the first page's tokens.

    Args:
        lora: Name of the LoRA adapter, None for the base model (which differs from "").
        salt: A tenant's salt. Without one, a tenant can time whether another sent a prompt.
    """
    return hashlib.sha256(b"l3store.seed.1" + frame(lora) + frame(salt)).digest()


def page_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the hash of a page from the hash before it (or the `seed`) and its token ids.

    Raises:
        ValueError: `before` is not 32 bytes long.
        OverflowError: A token id is negative or above 2**64 - 1.
    """
    if len(before) != HASH_BYTES:
        raise ValueError(f"a page hash has {HASH_BYTES} bytes, not {len(before)}")
    ids = array("Q", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    state = hashlib.sha256(b"l3store.page.1" + before)
    state.update(len(ids).to_bytes(8, "little"))
    state.update(ids)
    return state.digest()


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive pages of one prefix, each with its parent and depth.

    Attributes:
        hashes: The page hashes, 32 bytes each, in prefix order.
        parent: Hash of the page before the first one; `FIRST_PAGE` where there is none, None where
            the engine did not tell.
        depth: Number of pages before the first one, None where the engine did not tell.
    """

    hashes: tuple[bytes, ...]
    parent: bytes | None = FIRST_PAGE
    depth: int | None = 0

    def __post_init__(self) -> None:
        for value in (*self.hashes, self.parent):
            if value is not None and len(value) != HASH_BYTES:
                raise ValueError(f"a page hash has {HASH_BYTES} bytes, not {len(value)}")
        if self.depth is not None and not 0 <= self.depth < _DEPTHS - len(self.hashes):
            raise ValueError(f"depth {self.depth} does not fit into 32 bits without a sign")

    @classmethod
    def from_tokens(
        cls,
        tokens: Sequence[int],
        page_size: int,
        *,
        lora: str | None = None,
        salt: str | None = None,
    ) -> Chain:
        """Returns the chain of all whole pages of a prompt; a tail shorter than a page is left out.

        Raises:
            ValueError: `page_size` is not positive.
        """
        start = seed(lora, salt)
        return cls(_hashes(start, tokens, page_size))

    @classmethod
    def from_hex(
        cls, hashes: Sequence[str], *, parent: str | None = None, depth: int | None = None
    ) -> Chain:
        """Returns the chain of an engine's own hexadecimal page hashes.

        Args:
            hashes: 64 hexadecimal digits each.
            parent: The page before the first one, "" for none, None for unknown.
            depth: Pages before the first one, None for unknown.
        """
        before = None if parent is None else bytes.fromhex(parent) if parent else FIRST_PAGE
        if depth is None and before == FIRST_PAGE:
            depth = 0
        return cls(tuple(map(bytes.fromhex, hashes)), before, depth)

    def extended(self, tokens: Sequence[int], page_size: int) -> Chain:
        """Returns this chain with the whole pages of further tokens behind it.

        Equal to the chain made from the start at once.

        Raises:
            ValueError: The chain is empty, so there is no hash to continue from.
        """
        if not self.hashes:
            raise ValueError("an empty chain has no hash to continue from; use from_tokens")
        more = _hashes(self.hashes[-1], tokens, page_size)
        return Chain(self.hashes + more, self.parent, self.depth)

    def __len__(self) -> int:
        return len(self.hashes)

    @overload
    def __getitem__(self, index: int) -> Link: ...
    @overload
    def __getitem__(self, index: slice) -> Chain: ...
    def __getitem__(self, index: int | slice) -> Link | Chain:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self.hashes))
            if step != 1:
                raise ValueError("a chain is cut in prefix order, step 1")
            return Chain(self.hashes[start:stop], self._parent(start), self._depth(start))
        at = range(len(self.hashes))[index]
        return self.hashes[at], self._parent(at), self._depth(at)

    def __iter__(self) -> Iterator[Link]:
        parent, depth = self.parent, self.depth
        for value in self.hashes:
            yield value, parent, depth
            parent, depth = value, None if depth is None else depth + 1

    def keys(self, place: str) -> list[str]:
        """Returns the object names of these pages in `place`.

        Raises:
            ValueError: `place` is outside the grammar.
        """
        prefix = check_place(place) + "/"
        return [prefix + value.hex() for value in self.hashes]

    def _parent(self, at: int) -> bytes | None:
        return self.hashes[at - 1] if at else self.parent

    def _depth(self, at: int) -> int | None:
        return None if self.depth is None else self.depth + at


def _hashes(before: bytes, tokens: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    if page_size <= 0:
        raise ValueError(f"page_size must be positive, not {page_size}")
    found = []
    for at in range(0, len(tokens) - page_size + 1, page_size):
        before = page_hash(before, tokens[at : at + page_size])
        found.append(before)
    return tuple(found)
