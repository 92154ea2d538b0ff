"""The launch line of SGLang with L3Store as its L3, checked as far as it can be without the engine.

Needs neither SGLang nor torch. Written against sglang 0.5.23; tests/sglang/test_launch.py gives the
line to SGLang's own parser.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from l3store import registry
from l3store.adapters.sglang import options
from l3store.config import STACK_OPTIONS, StoreURL, is_secret, parse_size
from l3store.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["LAYOUTS", "PREFETCH_POLICIES", "WRITE_POLICIES", "Launch", "look_at_store"]

LAYOUTS = {
    "page_first": "kernel",
    "page_first_direct": "direct",
    "layer_first": "kernel",
    "page_head": "kernel",
}
"""Layout of host pools -> the io backend that moves its pages. With another one SGLang changes the
pair (page_first, page_first_direct) or fails at the first page (page_head)."""

PREFETCH_POLICIES = ("best_effort", "timeout", "wait_complete")
WRITE_POLICIES = ("write_back", "write_through", "write_through_selective")

_FOLDERS = ("file", "nvme")
"""Schemes whose URL is a folder: looking at it costs nothing and changes nothing."""
_THRESHOLD = 256  # tokens; SGLang's own default
_SMALL_PAGE = 16
_LEAST_CAPACITY = 1 << 30
_TOKEN_BYTES = 147456  # Qwen3-8B in bfloat16: 36 layers x 8 heads x 128 x (K and V) x 2 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the operator wants; checked when it is made.

    Raises:
        ConfigError: A value is none that SGLang or the adapter takes, or two contradict each other;
            the message names the nearest valid one.
    """

    url: str
    """The store, with the options of its backend and of the wrappers."""
    model: str
    """SGLang's ``--model-path``: a folder, or a name of the hub."""
    tp: int = 1
    pp: int = 1
    page_size: int = 64
    """Tokens."""
    layout: str = "page_first"
    prefetch_policy: str = "timeout"
    write_policy: str = "write_through"
    hicache_ratio: float | None = None
    """Host memory (L2) over GPU memory; neither this nor `hicache_size`: SGLang's default."""
    hicache_size: int | None = None
    """GB of host memory (L2) of each rank."""
    tag: str | None = None
    weights_revision: str | None = None
    dtype: str | None = None
    stages: tuple[int, ...] | None = None
    """Layers of each pipeline stage; told to SGLang and to the adapter alike."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "page_size", "hicache_ratio", "hicache_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a positive number, not {value}")
        if not self.model:
            raise ConfigError("model is empty: name a folder, or a name of the hub")
        if self.hicache_ratio is not None and self.hicache_size is not None:
            raise ConfigError("hicache_ratio and hicache_size: name one, not both")
        _choose("layout", self.layout, LAYOUTS)
        _choose("prefetch_policy", self.prefetch_policy, PREFETCH_POLICIES)
        _choose("write_policy", self.write_policy, WRITE_POLICIES)
        options.load(self.extra_config())
        if self.stages is not None:
            self._check_stages(self.stages)

    def _check_stages(self, stages: tuple[int, ...]) -> None:
        if len(stages) != self.pp:
            raise ConfigError(
                f"stages {_commas(stages)} are {len(stages)}, but pp is {self.pp}; "
                f"name {self.pp}, or pp {len(stages)}"
            )
        if self.pp == 1:
            raise ConfigError("stages: with pp 1 there is one stage, which needs no naming")

    def extra_config(self) -> dict[str, Any]:
        """Returns the value of ``--hicache-storage-backend-extra-config``."""
        # SGLang asks L3 for no less than this, counted in whole pages. Rounded up here, so that the
        # number that stands in the configuration is the one in force.
        threshold = -(-_THRESHOLD // self.page_size) * self.page_size
        told = {
            "tag": self.tag,
            "weights_revision": self.weights_revision,
            "dtype": self.dtype,
            "stages": self.stages,
        }
        return {
            "backend_name": "l3store",
            "module_path": "l3store.adapters.sglang",
            "class_name": "L3StoreHiCache",
            "interface_v1": 1,  # without it each page is copied twice
            "hicache_storage_pass_prefix_keys": True,  # else stores do not know a page's parent
            "prefetch_threshold": threshold,
            "url": self.url,
            **{name: value for name, value in told.items() if value is not None},
        }

    def line(self) -> str:
        """Returns the launch line for a POSIX shell, one flag a line."""
        flags: dict[str, object] = {
            "--model-path": self.model,
            "--tp-size": self.tp,
            "--pp-size": self.pp,
            "--page-size": self.page_size,
            "--enable-hierarchical-cache": True,
            "--hicache-ratio": self.hicache_ratio,
            "--hicache-size": self.hicache_size,
            "--hicache-write-policy": self.write_policy,
            "--hicache-mem-layout": self.layout,
            "--hicache-io-backend": LAYOUTS[self.layout],
            "--hicache-storage-backend": "dynamic",
            "--hicache-storage-prefetch-policy": self.prefetch_policy,
            "--hicache-storage-backend-extra-config": msgspec.json.encode(
                self.extra_config()
            ).decode(),
        }
        lines = ["sglang serve"]
        if self.stages is not None:  # one fact, told to both: SGLang refuses a wrong sum
            lines.insert(0, f"SGLANG_PP_LAYER_PARTITION={_commas(self.stages)}")
        for flag, value in flags.items():
            if value is True:
                lines.append(f"  {flag}")
            elif value is not None:
                lines.append(f"  {flag} {shlex.quote(str(value))}")
        return " \\\n".join(lines)

    def warnings(self) -> list[str]:
        """Returns what SGLang takes and is hardly meant."""
        found = []
        url = StoreURL.parse(self.url)
        if self.page_size & (self.page_size - 1):
            found.append(
                f"page_size {self.page_size} does not divide SGLang's chunks of prefill, which are "
                "powers of two: add --chunked-prefill-size with a multiple of it"
            )
        if self.page_size < _SMALL_PAGE:
            found.append(
                f"page_size {self.page_size}: every page is an object of its own in L3, and small "
                f"ones cost the most; {_SMALL_PAGE} or more"
            )
        if self.layout == "layer_first":
            found.append(
                "layout layer_first: a page lies in a piece for each layer; page_first in one or "
                "two, which costs less to move"
            )
        if self.layout == "page_head":
            found.append("layout page_head: SGLang has it for models without MLA only")
        if self.prefetch_policy == "best_effort":
            found.append(
                "prefetch_policy best_effort: a request takes what has arrived when it is "
                "scheduled, on an idle engine next to nothing"
            )
        if url.scheme == "file":
            found.append("file:// evicts nothing: it grows until its file system is full")
        secrets = ["password"] if url.password is not None else []
        secrets += [f"option {name!r}" for name in url.options if is_secret(name)]
        if secrets:
            found.append(
                f"the URL's {secrets[0]} stands in the launch line, where all users of the machine "
                "see it: put the JSON (--json) into a file of mode 0600 that ends in .json, and "
                "give @FILE in its place, or let the engine's environment say it"
            )
        if url.options.get("mode") == "ro":
            found.append("mode=ro: nothing is backed up, hits are what others stored")
        ranks = self.tp * self.pp
        if url.scheme == "nvme" and ranks > 1 and "writers" not in url.options:
            found.append(
                "nvme without option 'writers': the first ranks may leave no room for the last, "
                "and a page that one rank lacks is a miss for all. Name as many as write on a "
                f"machine, no more, as the share of one that never comes stays empty: "
                f"writers={ranks} if all {ranks} ranks are on one; of a pure MLA model (DeepSeek) "
                f"only one a stage writes: writers={self.pp}"
            )
        if self.model.startswith(("/", ".")) and not os.path.exists(self.model):
            found.append(f"model {self.model} is not on this machine")
        return found


def look_at_store(launch: Launch) -> list[str]:
    """Checks the URL of `launch` with its backend, and returns warnings.

    Changes nothing and connects to nothing: a folder is looked at, a store elsewhere is not. Blocks
    for that.

    Raises:
        ConfigError: There is no such scheme, an option is wrong, or the place is no store and
            cannot become one.
        BackendUnavailable: The folder cannot be read.
    """
    url = StoreURL.parse(launch.url).without(STACK_OPTIONS)
    kind = registry.backend_class(url.scheme)
    if url.scheme == "memory":
        raise ConfigError(
            "memory:// lives in one process: each rank would have a store of its own, gone when "
            "the engine ends. Name one that outlives it, such as "
            "nvme:///mnt/nvme0/l3?capacity=200GiB or file:///mnt/l3"
        )
    if url.scheme not in _FOLDERS:
        if kind.check_url(url):
            return []
        return [f"{url} was not opened, so options of {url.scheme} are not checked: --check does"]
    there = _holds_something(url.path)
    # An empty folder is one to come, and with a name below it the same is found out.
    path = f"{url.path}/store" if not there and os.path.isdir(url.path) else url.path
    look = replace(url, path=path, options={**url.options, **kind.read_only_options})
    found = []
    capacity = 0
    try:
        with kind.from_url(look) as backend:
            capacity = int(backend.details().get("capacity bytes", 0))
    except ConfigError as error:
        # Options and names come first, so what is missing here is the store alone: SGLang makes it.
        if there or not isinstance(error.__cause__, FileNotFoundError):
            raise
        if kind.read_only_options.items() <= url.options.items():
            raise ConfigError(f"{url} is no store yet, and its options forbid making it") from error
        capacity = parse_size(url.options.get("capacity", 0))
        parent = os.path.dirname(url.path.rstrip("/"))
        if not os.path.isdir(parent):
            found.append(f"{parent} is not on this machine: it must be there when SGLang starts")
        elif not os.access(parent, os.W_OK | os.X_OK):
            found.append(f"{parent} cannot be written, so {url.path} cannot be made, by this user")
        elif url.scheme == "nvme":
            found += _no_space(parent, capacity)
    return found + _too_small(launch, capacity)


def _no_space(folder: str, capacity: int) -> list[str]:
    if not capacity:
        return ["nvme without option 'capacity': a new store has 16 GiB"]
    free = shutil.disk_usage(folder).free
    if capacity > free:
        return [f"capacity of {capacity / 1e9:.1f} GB: {folder} has {free / 1e9:.1f} GB free"]
    return []


def _too_small(launch: Launch, capacity: int) -> list[str]:
    host = (launch.hicache_size or 0) * 10**9 * launch.tp * launch.pp
    if capacity and capacity <= host:
        return [
            f"capacity of {capacity / 1e9:.1f} GB: the host memory of all ranks holds "
            f"{host / 1e9:.0f} GB, so L3 has nothing that L2 has not, but after a restart"
        ]
    if capacity and capacity < _LEAST_CAPACITY:
        tokens = capacity // _TOKEN_BYTES
        return [f"capacity of {capacity / 1e6:.1f} MB: {tokens} tokens of Qwen3-8B, for example"]
    return []


def _holds_something(path: str) -> bool:
    try:
        return bool(os.listdir(path))
    except FileNotFoundError:
        return False
    except OSError:  # whoever opens it says why
        return True


def _choose(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"unknown {what} {name!r}{nearest(name, known)}")


def _commas(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
