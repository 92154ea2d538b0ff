"""The replicated half of a small engine: host pages, prefix tree and its logical clock.

One instance on every rank; all must stay equal. It stands for an engine's own, and obeys the rules
that docs/consensus.md asks of one: victims by a logical counter, leaves first, and no look at
anything that this rank alone knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from l3store.consensus.values import TicketId
    from l3store.testing.simulation.plan import Page

__all__ = ["Boundless", "Host", "Node", "Slot"]

Slot = int
"""Number of a host page."""


@dataclass(slots=True)
class Node:
    """A page in the prefix tree."""

    page: Page
    slot: Slot
    parent: Page | None
    stamp: float
    children: int = 0
    pins: int = 0
    written: bool = True
    """Whether its host page holds it by now; before that nobody may load it."""
    stored: bool = False
    """On L3, by the word of all ranks."""


@dataclass(slots=True)
class Reserved:
    """The host pages of a ticket."""

    pages: tuple[Page, ...]
    parent: Page | None
    slots: list[Slot] = field(default_factory=list)


class Host:
    """Host pages and tree; a `Ledger`.

    Attributes:
        stamp: The last one that was given out.
        joined: Pages of tickets that were settled, with their slots, for whoever checks them.
    """

    def __init__(self, capacity: int, freed: Callable[[Slot], None]) -> None:
        self.capacity = capacity
        self.free: list[Slot] = list(range(capacity))
        self.nodes: dict[Page, Node] = {}
        self.tickets: dict[TicketId, Reserved] = {}
        self.joined: list[tuple[Page, Slot]] = []
        self._freed = freed
        self.stamp = 0

    # -- the ledger of the machine

    def expect(self, ticket: TicketId, parent: Page | None, pages: Sequence[Page]) -> None:
        """Tells which pages a ticket is about, before anything is taken for it."""
        self.tickets[ticket] = Reserved(tuple(pages), parent)

    def take(self, ticket: TicketId, pages: int) -> bool:
        """Reserves host pages for a ticket: all or none."""
        slots = self.allocate(pages)
        if slots is None:
            return False
        self.tickets[ticket].slots = slots
        return True

    def settle(self, ticket: TicketId, pages: int) -> None:
        """The first pages of a ticket join the tree, but for those that are there by now."""
        reserved = self.tickets[ticket]
        parent = reserved.parent
        for page, slot in zip(reserved.pages[:pages], reserved.slots[:pages], strict=True):
            self.joined.append((page, slot))
            if not self.insert(page, slot, parent):
                self.give(slot)
            parent = page
        del reserved.slots[:pages]

    def release(self, ticket: TicketId, pages: int) -> None:
        """The last pages of a ticket are free."""
        slots = self.tickets.pop(ticket).slots
        for slot in slots[:pages]:
            self.give(slot)

    def forget(self, ticket: TicketId) -> None:
        """A ticket ended before anything was taken for it."""
        del self.tickets[ticket]

    # -- the tree

    def match(self, pages: Sequence[Page]) -> int:
        """Returns how many pages from the start are in the tree, and marks them as used."""
        count = 0
        for page in pages:
            node = self.nodes.get(page)
            if node is None or not node.written:
                break
            node.stamp = self.tick()
            count += 1
        return count

    def pin(self, pages: Sequence[Page], change: int) -> None:
        """Pinned pages are not evicted."""
        for page in pages:
            self.nodes[page].pins += change

    def insert(self, page: Page, slot: Slot, parent: Page | None, *, written: bool = True) -> bool:
        """Puts a page into the tree; False: it is there already, or its parent has gone."""
        if page in self.nodes or (parent is not None and parent not in self.nodes):
            return False
        self.nodes[page] = Node(page, slot, parent, self.tick(), written=written)
        if parent is not None:
            self.nodes[parent].children += 1
        return True

    def tick(self) -> float:
        """Returns the next stamp: a logical one, so that all ranks evict the same pages."""
        self.stamp += 1
        return self.stamp

    # -- slots

    def allocate(self, count: int) -> list[Slot] | None:
        """Returns so many free slots, evicting for them; None and nothing evicted: no room."""
        missing = count - len(self.free)
        if missing > 0:
            if missing > self._evictable():
                return None
            for _ in range(missing):
                self._evict()
        slots = self.free[:count]
        del self.free[:count]
        return slots

    def give(self, slot: Slot) -> None:
        """A slot is free."""
        self._freed(slot)
        self.free.append(slot)

    def _evictable(self) -> int:
        """Pages with no pin on them or below them."""
        held = set()
        for node in self.nodes.values():
            if node.pins:
                page: Page | None = node.page
                while page is not None and page not in held:
                    held.add(page)
                    page = self.nodes[page].parent
        return len(self.nodes) - len(held)

    def _evict(self) -> None:
        leaves = [node for node in self.nodes.values() if not node.children and not node.pins]
        victim = min(leaves, key=lambda node: node.stamp)
        del self.nodes[victim.page]
        if victim.parent is not None:
            self.nodes[victim.parent].children -= 1
        self.give(victim.slot)

    # -- what must hold

    def digest(self) -> int:
        """Returns a number over the whole state, but for stamps: their order is what counts."""
        tree = [(n.page, n.slot, n.pins, n.written, n.stored) for n in self.nodes.values()]
        held = [(ticket, r.slots) for ticket, r in self.tickets.items()]
        return crc32(repr((self.free, tree, held)).encode())

    def lost(self) -> list[Slot]:
        """Returns the slots that are not in one place, free, in the tree or reserved: if any."""
        places = [*self.free, *(node.slot for node in self.nodes.values())]
        for each in self.tickets.values():
            places += each.slots
        if len(places) == self.capacity == len(set(places)):
            return []
        return [slot for slot in range(self.capacity) if places.count(slot) != 1]


class Boundless:
    """A ledger with room for everything, for groups whose pages nobody looks at."""

    def take(self, ticket: TicketId, pages: int) -> bool:
        """Reserves nothing, and says yes."""
        return True

    def settle(self, ticket: TicketId, pages: int) -> None:
        """Does nothing."""

    def release(self, ticket: TicketId, pages: int) -> None:
        """Does nothing."""
