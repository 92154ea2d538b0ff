"""The wheel: loaded quietly, one at a time, and never after a fork.

What this process has of it is shared by all stores in it, so all that is global stands here.
"""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import distributions
from threading import Lock
from typing import TYPE_CHECKING, Any

from l3store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["CODES", "check_wheels", "code_name", "new_store", "pinned_config"]

_SILENT = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", "MC_YLT_LOG_LEVEL": "ERROR"}
_BOUNDS = {"MC_TCP_STATUS_TIMEOUT_SEC": "1", "MC_TCP_PROGRESS_TIMEOUT_SEC": "1"}
_environment = Lock()

CODES = {
    -200: "NO_AVAILABLE_HANDLE", -600: "INVALID_PARAMS", -601: "ILLEGAL_CLIENT",
    -700: "INVALID_WRITE", -701: "INVALID_READ", -702: "INVALID_REPLICA",
    -703: "REPLICA_IS_NOT_READY", -704: "OBJECT_NOT_FOUND", -705: "OBJECT_ALREADY_EXISTS",
    -706: "OBJECT_HAS_LEASE", -707: "LEASE_EXPIRED", -800: "TRANSFER_FAIL", -900: "RPC_FAIL",
    -901: "RPC_TIMEOUT",
}  # fmt: skip
"""Of ``mooncake-store/include/types.h``, release 0.3.13; as seen from the calls used here."""


@contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process for a while: the library reads them when it is set up.

    And those that make it quiet, unless somebody has set them.
    """
    with _environment:
        before = {name: os.environ.get(name) for name in (*_SILENT, *given)}
        for name, value in _SILENT.items():
            os.environ.setdefault(name, value)
        os.environ.update(given)
        try:
            yield
        finally:
            for name, old in before.items():
                if old is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = old


# The bounds are read at every transfer, so they stay: without them a call waits for an owner that
# is frozen or cut off for 30 s. What somebody has set is left as it is.
for _name, _value in _BOUNDS.items():
    os.environ.setdefault(_name, _value)

try:
    with environment({}):
        from mooncake import store as _library
except ImportError as _error:
    raise ImportError(
        f"{_error}: mooncake:// needs one of the wheels of pip install 'l3store[mooncake]' "
        "(CUDA 12), 'l3store[mooncake-cuda13]' or 'l3store[mooncake-cpu]', and of the system "
        "libibverbs1, libnuma1 and libcurl4"
    ) from _error

_loaded_in = os.getpid()


def _hush() -> None:
    """Ends its log, unless somebody has asked for one: each failure is an exception of ours.

    Its own levels go to errors only, and it calls errors what is none ("Local segment descriptor
    not found", at each beginning). The flag is that of glog, which the wheels bring along; in one
    that does not it logs errors.
    """
    if not {"GLOG_minloglevel", "MC_LOG_LEVEL"} & os.environ.keys():
        with suppress(OSError, ValueError):
            flag = ctypes.c_int.in_dll(
                ctypes.CDLL(_library.__file__), "_ZN3fLI17FLAGS_minloglevelE"
            )
            flag.value = 3  # FATAL


_hush()


def check_wheels() -> None:
    """Accepts what is installed.

    Raises:
        ConfigError: Several wheels share one package, so that files of both are mixed in it; or
            this process was forked after the library was loaded: its threads are not here.
    """
    if len(wheels := _wheels()) > 1:
        raise ConfigError(
            f"{' and '.join(wheels)} are installed together and overwrite each other's files: "
            "pip uninstall them all, and install one"
        )
    if os.getpid() != _loaded_in:
        raise ConfigError(
            "Mooncake's library was loaded before this process was forked, and does not work in "
            "it: start processes with the method 'spawn'"
        )


@cache
def _wheels() -> list[str]:
    found = {re.sub(r"[-_.]+", "-", one.name).lower() for one in distributions()}
    return sorted(name for name in found if name.startswith("mooncake-transfer-engine"))


def new_store(seconds: Mapping[str, float], *setup: object) -> Any | None:
    """Returns a client of the library that is set up, or None when that failed.

    Blocks, and holds the interpreter's lock: about 40 ms, with a master that is frozen for the
    time of ``MC_RPC_TIMEOUT_MS`` in `seconds`.

    Args:
        seconds: Bounds by the name of the library's variable, in seconds.
        *setup: Arguments of its `setup`.
    """
    bounds = {name: str(max(1, round(value * 1000))) for name, value in seconds.items()}
    store = _library.MooncakeDistributedStore()
    with environment(bounds | {"MC_STORE_CLIENT_SETUP_RETRIES": "1"}):
        try:
            return store if store.setup(*setup) == 0 else None
        except MemoryError:
            return None


def pinned_config() -> Any:
    """Returns how small objects are kept: never evicted, in up to three owners' memory."""
    config = _library.ReplicateConfig()
    config.with_hard_pin, config.replica_num = True, 3
    return config


def code_name(code: int) -> str:
    """Returns the library's number and word for what went wrong."""
    return f"{code} {CODES[code]}" if code in CODES else str(code)
