"""SGLang HiCache's storage backend, for ``--hicache-storage-backend dynamic``.

`L3StoreHiCache` is what SGLang loads; docs/sglang.md says how. The parts:

- `options`: the extra-config JSON; needs neither SGLang nor torch;
- `launch`: the checked launch line of ``l3store sglang-config``;
- `engine`: all that is read from SGLang itself, in one place;
- `weights`: which weights a model path holds; `updates`: that they were updated meanwhile;
- `pools`: where the pages of a host pool lie in memory;
- `identity`: descriptors and shards of those pages;
- `prefixes`: which prefixes several pools together can restore;
- `traffic`: pages between host pools and the store, where nothing raises;
- `tally`: outcomes by reason, and the log lines about them;
- `hicache`: the backend.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from l3store.errors import nearest

if TYPE_CHECKING:
    from l3store.adapters.sglang.hicache import L3StoreHiCache

__all__ = ["VERSION", "L3StoreHiCache", "another_version"]

VERSION = "0.5.23"
"""Of sglang, that the adapter was written for."""


def another_version(problem: Exception) -> str:
    """Returns what to say of something that this SGLang has not, or has otherwise."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "is not installed"
    return (
        f"sglang {found}: {problem}. This adapter is written for {VERSION}: docs/sglang.md, "
        "'Another version of SGLang'"
    )


def __getattr__(name: str) -> Any:
    # Late: the options of this package are of use where SGLang is not installed.
    if name == "L3StoreHiCache":
        try:
            from l3store.adapters.sglang.hicache import L3StoreHiCache
        except ImportError as error:
            raise ImportError(another_version(error)) from error
        return L3StoreHiCache
    # SGLang passes this on to whoever mistyped `class_name`.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest(name, __all__)}")
