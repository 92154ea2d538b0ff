"""The payload bytes of each place: claimed once in the store, remembered in the process.

All pages of a place have one length. The store says which, in a small object a place that is made
by whoever stores a page first and is never changed. So a stored page of another length than
the caller's buffers is damage when the place has the caller's length, and his mistake when not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Lengths", "parse_length"]

_DIGITS = 19  # of any number of bytes


class Lengths:
    """The lengths of a store's places. Thread-safe; blocks where `read` and `claim` do.

    Args:
        read: Returns the payload bytes that the store has for a place, None where it has none yet.
        claim: Writes them for a place, unless they are there: of two processes one is first, and
            the other one's claim changes nothing.
    """

    def __init__(
        self, read: Callable[[str], int | None], claim: Callable[[str, int], None]
    ) -> None:
        self._read, self._claim = read, claim
        self._known: dict[str, int] = {}

    def known(self, place: str) -> int | None:
        """Returns the payload bytes of a place; None: no page of it was ever stored."""
        return self._known[place] if place in self._known else self._fresh(place)

    def check(self, place: str, length: int, *, claim: bool = False) -> None:
        """Accepts the payload bytes that a caller has for a place, or raises.

        Args:
            place: The place.
            length: The caller's payload bytes.
            claim: Write them down where the store has none.

        Raises:
            ValueError: The place has others.
        """
        if self._known.get(place) == length:
            return
        found = self._fresh(place)  # what is remembered may be of a store that was emptied since
        if found is None and claim:
            self._claim(place, length)
            found = self._fresh(place)  # another process may have been first
        if found is not None and found != length:
            raise ValueError(
                f"pages of {place} have {found} payload bytes in this store, not {length}"
            )

    def check_all(self, lengths: Mapping[str, int], *, claim: bool = False) -> None:
        """Accepts a batch, as `l3store.page.check_batch` returns it, or raises.

        Every place is looked at before one is claimed: a batch that is refused leaves nothing.

        Raises:
            ValueError: A place has another length.
        """
        for place, length in lengths.items():
            self.check(place, length)
        if claim:
            for place, length in lengths.items():
                self.check(place, length, claim=True)

    def recheck(self, place: str, length: int) -> None:
        """Asks the store again: a page of another length has turned up.

        Raises:
            ValueError: The place has that other length by now. Otherwise the page is damaged.
        """
        self._known.pop(place, None)
        self.check(place, length)

    def _fresh(self, place: str) -> int | None:
        found = self._read(place)
        if found is None:
            self._known.pop(place, None)
        else:
            self._known[place] = found
        return found


def parse_length(text: bytes, where: str) -> int:
    """Returns the number that a place's small object holds, written in decimal digits.

    Raises:
        BackendUnavailable: It is damaged; the message says what `where` must hold.
    """
    if not text.isdigit() or len(text) > _DIGITS:
        raise BackendUnavailable(
            f"{where} is damaged: {text!r} is no number; "
            "write the payload bytes of this place's pages into it"
        )
    return int(text)
