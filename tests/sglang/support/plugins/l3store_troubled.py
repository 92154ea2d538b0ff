"""``troubled:///store?of=nvme&error=1``: a store of another kind that meets faults.

The faults are those of `l3store.wrap.Faulty`, by name and rate, and ``bug=1``: raise what no
backend may raise. With ``at=page_get`` only that call meets them. What else the URL says is for the
store itself.
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

_OURS = {**dict.fromkeys(KINDS, float), "seed": int, "delay_seconds": float, "bug": int, "at": str}


class Troubled(Faulty):
    @classmethod
    def from_url(cls, url: StoreURL) -> Troubled:
        options = dict(url.options)
        kind = options.pop("of")
        faults = {name: _OURS[name](options.pop(name)) for name in _OURS.keys() & options.keys()}
        inner = registry.backend_class(kind).from_url(replace(url, scheme=kind, options=options))
        return cls(inner, **faults)

    def __init__(self, inner: Backend, *, bug: int = 0, at: str = "", **faults: Any) -> None:
        super().__init__(inner, **faults)
        self._bug, self._at = bug, at

    def batch_exists(self, keys: Sequence[str]) -> int:
        return self._meets("batch_exists").batch_exists(keys)

    def page_get(self, keys: Sequence[str], *rest: Any) -> list[bool]:
        return self._meets("page_get").page_get(keys, *rest)

    def page_set(self, keys: Sequence[str], *rest: Any) -> list[bool]:
        return self._meets("page_set").page_set(keys, *rest)

    def _meets(self, call: str) -> Any:
        """Returns whose method does a call."""
        if self._at not in ("", call):
            return self.inner
        if self._bug:
            raise RuntimeError(f"a bug of the store in {call}")
        return super()
