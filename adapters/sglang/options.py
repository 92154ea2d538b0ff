"""The extra-config JSON of ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec

from l3store.config import STACK_OPTIONS, Duration, StackOptions, StoreURL, load_options
from l3store.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DTYPES", "ENGINE_OPTIONS", "SGLangOptions", "load"]

ENGINE_OPTIONS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
        "file_storage_path",
    }
)
"""What SGLang 0.5.23 reads from the same JSON; some it takes out before we see it."""

DTYPES = (
    "bfloat16", "float16", "float32",  # what host pools say
    "fp8_e4m3", "fp8_e5m2", "nvfp4", "fp4_mx_block16",  # what they do not: they say uint8
)  # fmt: skip
"""Logical dtypes of KV."""

_GIVEN_BY = "extra config of SGLang"


class SGLangOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the adapter itself is told; the options of the wrappers may stand beside them."""

    url: str
    """The store, such as ``nvme:///mnt/nvme0/l3?capacity=200GiB``."""
    tag: str | None = None
    """A word that keeps this deployment's pages apart from those of others."""
    weights_revision: str | None = None
    """Names the weights; without it they are told by a fingerprint of the model's files."""
    draft_revision: str | None = None
    """The same for the draft model of speculative decoding."""
    dtype: str | None = None
    """Logical KV dtype, where neither the host pool nor ``--kv-cache-dtype`` tells it."""
    stages: tuple[int, ...] | None = None
    """Layers of each pipeline stage, where they do not follow from the model's configuration."""
    log_interval: Duration = Duration(60.0)
    """Shortest time between two summary lines in the log."""

    def __post_init__(self) -> None:
        for name in ("tag", "weights_revision", "draft_revision"):
            if getattr(self, name) == "":  # a variable of a script that was not set
                raise ConfigError(f"option {name!r} is empty: leave it out, or say what it is")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}{nearest(self.dtype, DTYPES)}")
        if self.stages is not None and min(self.stages, default=0) < 1:
            told = ",".join(map(str, self.stages)) or "none"
            raise ConfigError(f"stages must each be positive, such as 20,16, not {told}")
        if self.log_interval <= 0:
            raise ConfigError(f"option 'log_interval' must be positive, not {self.log_interval}")


def load(extra_config: Mapping[str, Any] | None) -> SGLangOptions:
    """Returns the options of an extra config, with those of the wrappers moved into `url`.

    Opens nothing, needs neither SGLang nor torch.

    Raises:
        ConfigError: `url` is missing or no URL, an option is unknown, its value invalid, or stands
            in the URL as well; or ``late=pending``, which SGLang cannot honour.
    """
    ours = {
        name: value for name, value in (extra_config or {}).items() if name not in ENGINE_OPTIONS
    }
    _check_interface(extra_config or {})
    stack = {name: ours.pop(name) for name in sorted(STACK_OPTIONS & ours.keys())}
    if "url" not in ours:
        raise ConfigError(
            f"{_GIVEN_BY}: 'url' is missing, such as "
            '"url": "nvme:///mnt/nvme0/l3?capacity=200GiB"'
        )
    if not isinstance(ours["url"], str):  # not shown: there may be a password in it
        raise ConfigError(
            f"option 'url' ({_GIVEN_BY}) is one text, not {type(ours['url']).__name__}"
        )
    known = SGLangOptions.__struct_fields__
    if unknown := sorted(ours.keys() - set(known)):
        raise ConfigError(
            f"unknown option {unknown[0]!r} ({_GIVEN_BY}; options of the store stand in "
            f"its url){nearest(unknown[0], {*known, *STACK_OPTIONS, *ENGINE_OPTIONS})}"
        )
    if not isinstance(ours.get("stages"), list | tuple | None):
        raise ConfigError(
            f"option 'stages' ({_GIVEN_BY}) must be a list of the layers of each stage, "
            f"such as [20, 16], not {ours['stages']!r}"
        )
    options = load_options(SGLangOptions, "sglang", ours, given_by=_GIVEN_BY)
    in_url = StoreURL.parse(options.url).options
    if astray := sorted((set(known) - {"url"}) & in_url.keys()):
        raise ConfigError(
            f"option {astray[0]!r} stands in the url: its place is the extra config, beside it"
        )
    if twice := sorted(stack.keys() & in_url.keys()):
        raise ConfigError(f"option {twice[0]!r} stands in the extra config and in its url")
    wrappers = {name: value for name, value in in_url.items() if name in STACK_OPTIONS}
    given = {**wrappers, **stack}
    told = load_options(StackOptions, "stack", given, given_by=f"{_GIVEN_BY} or its url")
    if told.late == "pending":
        raise ConfigError(
            "late=pending: SGLang uses its host pages again as soon as it is answered; "
            "use late=wait or late=staged"
        )
    if stack:
        joint = "&" if "?" in options.url else "?"
        options = msgspec.structs.replace(options, url=options.url + joint + urlencode(stack))
    return options


def _check_interface(extra_config: Mapping[str, Any]) -> None:
    # SGLang takes any value for true that is not empty, "0" and "false" among them.
    told = extra_config.get("interface_v1", 1)
    if not isinstance(told, bool | int) or told not in (0, 1):
        raise ConfigError(
            f"option 'interface_v1' ({_GIVEN_BY}) must be 1, pages move in place, or 0, they are "
            f"copied, not {told!r}"
        )
