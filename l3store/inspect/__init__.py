"""Walks a store without the engine: what it holds, and what of it is damaged.

`look` opens a store without changing it, `listing` says what is there, `checking` checks every
page (`files` for stores that keep one file a page), `holes` finds pages that no prefix reaches.
"""

from __future__ import annotations

from l3store.inspect.checking import BadPage, CheckResult, PlaceCheck, check_store
from l3store.inspect.listing import (
    NamespaceView,
    PageView,
    PlaceView,
    StoreView,
    list_namespaces,
    list_pages,
    view_store,
)
from l3store.inspect.look import choose, open_to_look

__all__ = [
    "BadPage",
    "CheckResult",
    "NamespaceView",
    "PageView",
    "PlaceCheck",
    "PlaceView",
    "StoreView",
    "check_store",
    "choose",
    "list_namespaces",
    "list_pages",
    "open_to_look",
    "view_store",
]
