"""SGLang HiCache's storage backend, for ``--hicache-storage-backend dynamic``.

`L3StoreHiCache` is what SGLang loads; docs/sglang.md says how. The parts:

- `options`: the extra-config JSON; needs neither SGLang nor torch;
- `launch`: the checked launch line of ``l3store sglang-config``;
- `engine`: all that is read from SGLang itself, in one place;
- `weights`: which weights a model path holds; `updates`: that they were updated meanwhile;
- `pools`: where the pages of a host pool lie in memory;
- `identity`: descriptors and shards of those pages;
- `prefixes`: which prefixes several pools together can restore;
- `tally`: outcomes by reason, and the log lines about them;
- `hicache`: the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from l3store.errors import nearest

if TYPE_CHECKING:
    from l3store.adapters.sglang.hicache import L3StoreHiCache

__all__ = ["L3StoreHiCache"]


def __getattr__(name: str) -> Any:
    # Late: the options of this package are of use where SGLang is not installed.
    if name == "L3StoreHiCache":
        from l3store.adapters.sglang.hicache import L3StoreHiCache

        return L3StoreHiCache
    # SGLang passes this on to whoever mistyped `class_name`.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest(name, __all__)}")
