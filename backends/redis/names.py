"""What stands in the server under which name.

    <prefix>store          kind and format
    <prefix>meta           a hash: descriptors by name
    <prefix>lengths        a hash: payload bytes by place
    <prefix><key>          a page, one string

No key of a page has a colon, and all others here follow the prefix without a slash: they cannot be
taken for a page.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from l3store.keys import check_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Names"]

_GLOB = re.compile(r"([\\*?\[\]^])")


class Names:
    """The names under one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._raw = prefix.encode()
        self.marker = self._raw + b"store"
        self.meta = self._raw + b"meta"
        self.lengths = self._raw + b"lengths"
        self.health = self._raw + b"health:"
        """With a word behind it: a key of somebody who looks whether writing works."""

    def pages(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the names of pages."""
        if not keys:
            return []
        prefix = self._prefix  # printable, so without a line end, and keys have none either
        return (prefix + f"\n{prefix}".join(keys)).encode().split(b"\n")

    def key(self, name: bytes) -> str | None:
        """Returns the key of a page by its name; None: it is something else."""
        if not name.startswith(self._raw):
            return None
        try:
            key = name[len(self._raw) :].decode("ascii")
            check_keys((key,))
        except ValueError:  # UnicodeDecodeError is one, too
            return None
        return key

    def pattern(self, place: str | None) -> bytes:
        """Returns the glob of all pages, or of those of a place."""
        start = self._prefix if place is None else f"{self._prefix}{place}/"
        return _GLOB.sub(r"\\\1", start).encode() + b"*"
