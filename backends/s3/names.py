"""The names of objects: reversible, and the store's own never those of pages.

No part of a key begins with an underscore, so ``_l3`` cannot be a namespace or hash digits.
"""

from __future__ import annotations

import itertools

from l3store.keys import check_keys, check_meta_name

__all__ = ["Names"]

_DIGITS = 64  # of a page hash
_HEX = "0123456789abcdef"


class Names:
    """Object names below `prefix`, with `fanout` hash digits before the key.

    Args:
        prefix: Without slashes at its ends.
        fanout: 0: the key follows the prefix.
    """

    def __init__(self, prefix: str, fanout: int) -> None:
        self.root = f"{prefix}/"
        self._fanout = fanout
        self.marker = f"{prefix}/_l3/store.json"
        self.health = f"{prefix}/_l3/health"
        self.metas = f"{prefix}/_l3/meta/"
        self.lengths = f"{prefix}/_l3/bytes/"

    def page(self, key: str) -> str:
        """Returns the object of a key that follows the grammar."""
        if not self._fanout:
            return self.root + key
        return f"{self.root}{key[-_DIGITS : self._fanout - _DIGITS]}/{key}"

    def key(self, name: str) -> str | None:
        """Returns the key of an object; None: it is no page of this store."""
        key = name[len(self.root) + (self._fanout + 1 if self._fanout else 0) :]
        try:
            check_keys((key,))
        except ValueError:
            return None
        return key if self.page(key) == name else None

    def fans(self, place: str | None = None) -> list[str]:
        """Returns what the names of pages begin with, of one place or of all, in order."""
        behind = "" if place is None else f"{place}/"
        if not self._fanout:
            return [self.root + behind]
        digits = map("".join, itertools.product(_HEX, repeat=self._fanout))
        return [f"{self.root}{fan}/{behind}" for fan in digits]

    def meta(self, name: str) -> str:
        """Returns the object of a descriptor.

        Without slashes: some servers keep objects as files, where no folder may have that name.
        """
        return self.metas + name.replace("/", ",")

    def meta_of(self, name: str) -> str | None:
        """Returns whose descriptor an object is; None: nobody's."""
        text = name.removeprefix(self.metas)
        try:
            return check_meta_name(text.replace(",", "/"))
        except ValueError:
            return None

    def length(self, place: str) -> str:
        """Returns the object that has the payload bytes of a place."""
        return self.lengths + place.replace("/", ",")
