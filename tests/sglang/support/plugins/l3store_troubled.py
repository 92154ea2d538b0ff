"""``troubled:///store?of=nvme&error=1``: a store of another kind that meets faults.

The faults are those of `l3store.wrap.Faulty`, by name and rate, and ``bug=<call>``: that call
raises what no backend may raise. The other options are of the store itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from l3store import registry
from l3store.wrap import Faulty
from l3store.wrap.faulty import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from l3store.abc import Backend
    from l3store.config import StoreURL

__all__ = ["Troubled"]

_NUMBERS = {**dict.fromkeys(KINDS, float), "seed": int, "delay_seconds": float}


class Troubled(Faulty):
    def __init__(self, inner: Backend, *, bug: str = "", **faults: Any) -> None:
        super().__init__(inner, **faults)
        self._bug = bug

    @classmethod
    def from_url(cls, url: StoreURL) -> Troubled:
        options = dict(url.options)
        kind, bug = options.pop("of"), options.pop("bug", "")
        faults = {
            name: _NUMBERS[name](options.pop(name)) for name in _NUMBERS.keys() & options.keys()
        }
        inner = registry.backend_class(kind).from_url(replace(url, scheme=kind, options=options))
        return cls(inner, bug=bug, **faults)

    def batch_exists(self, keys: Sequence[str]) -> int:
        self._raise("batch_exists")
        return super().batch_exists(keys)

    def page_get(self, keys: Sequence[str], *rest: Any) -> list[bool]:
        self._raise("page_get")
        return super().page_get(keys, *rest)

    def page_set(self, keys: Sequence[str], *rest: Any) -> list[bool]:
        self._raise("page_set")
        return super().page_set(keys, *rest)

    def _raise(self, call: str) -> None:
        if call == self._bug:
            raise RuntimeError(f"a bug of the store in {call}")
