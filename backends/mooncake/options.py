"""Options of ``mooncake://``, and what stands in for them: the ``MOONCAKE_*`` environment."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec

from l3store.config import Duration, Size, StoreURL, load_options, parse_size
from l3store.errors import ConfigError, nearest

__all__ = ["PROTOCOLS", "Address", "MooncakeOptions", "from_url"]

PORT, ADMIN_PORT = 50051, 9003  # the master's defaults
_LEAST_SEGMENT = 16 << 20  # bytes; the library refuses less
PROTOCOLS = (
    "tcp", "rdma", "efa", "nvlink", "nvlink_intra", "hip", "barex", "cxl", "ascend", "ub",
    "ubshmem", "maca", "musa", "sunrise_link",
)  # fmt: skip
"""Those that the library knows; which of them it can do depends on the wheel."""
_prefix = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``mooncake://``. What is not given is taken from the ``MOONCAKE_*`` variables."""

    protocol: str | None = None
    """How pages travel (`PROTOCOLS`); else MOONCAKE_PROTOCOL, else ``tcp``."""
    device: str | None = None
    """RDMA devices, with commas; else MOONCAKE_DEVICE, else the library looks for them."""
    metadata: str | None = None
    """Where transfer engines find each other; else MOONCAKE_TE_META_DATA_SERVER, else
    ``P2PHANDSHAKE``."""
    host: str | None = None
    """By which name or address others reach this process; else MOONCAKE_LOCAL_HOSTNAME, else the
    address from which it reaches the master."""
    segment: Size | None = None
    """Bytes that this process lends to all; else MOONCAKE_GLOBAL_SEGMENT_SIZE, else 0. They end
    with it, and so do the pages in them."""
    local_buffer: Size | None = None
    """Bytes for the library's own copies; else MOONCAKE_LOCAL_BUFFER_SIZE, else 0: pages are moved
    without one."""
    admin: str | None = None
    """The master's admin (metrics) port, ``9003`` or ``host:9003``; without it no listing."""
    prefix: str = "l3store"
    """Begins the names of all objects of this store."""
    mode: Literal["rw", "ro"] = "rw"
    """``ro`` creates and changes nothing."""
    timeout: Duration = Duration(1.0)
    """For one answer of the master."""
    connect_timeout: Duration = Duration(0.2)
    """For reaching the master."""
    unregistered: Literal["auto", "direct", "copy", "refuse"] = "auto"
    """What happens to memory that was not announced by `register_buffer`: moved as it is
    (``direct``, right for tcp alone), by way of registered memory (``copy``), or a `ValueError`
    (``refuse``). ``auto``: direct for tcp, else copy."""

    calls: Literal["auto", "sessions", "plain"] = "auto"
    """Of the library, by which pages are moved: see `sessions`. ``auto``: sessions over tcp, where
    this process lends nothing."""

    def __post_init__(self) -> None:
        if self.protocol is not None and self.protocol not in PROTOCOLS:
            raise ConfigError(
                f"option 'protocol': {self.protocol!r} is none{nearest(self.protocol, PROTOCOLS)}"
            )
        if not _prefix.fullmatch(self.prefix):
            raise ConfigError(
                f"option 'prefix': {self.prefix!r} must be 1 to 64 letters, digits, '.', '_' or '-'"
            )
        if self.segment is not None and 0 < self.segment < _LEAST_SEGMENT:
            raise ConfigError(f"option 'segment': {self.segment} bytes must be 0, or 16MiB or more")
        for name in ("timeout", "connect_timeout"):
            if not 0.001 <= getattr(self, name) <= 3600:
                raise ConfigError(f"option {name!r} must be between 1ms and 1h")


def from_url(url: StoreURL) -> tuple[Address, MooncakeOptions]:
    """Returns the master's address and the options, each from the highest place that names it.

    Raises:
        ConfigError: An option is unknown or wrong, or nobody says where the master is.
    """
    if url.path.strip("/"):
        raise ConfigError(
            f"{url}: a Mooncake store has no path; did you mean {replace(url, path='')}"
            f"?prefix={url.path.strip('/')}"
        )
    if url.username is not None or url.password is not None:
        raise ConfigError(f"{url}: a Mooncake master knows no users and no passwords")
    options = load_options(MooncakeOptions, "mooncake", url.options)
    if url.host:
        address = Address(url.host, PORT if url.port is None else url.port)
    elif not (text := _text("MOONCAKE_MASTER", "")):
        raise ConfigError(
            "mooncake:// does not say where the master is: mooncake://host:50051, "
            "or MOONCAKE_MASTER=host:50051 in the environment"
        )
    else:
        address = parse_address(text, "environment MOONCAKE_MASTER", PORT)
    return address, _completed(options)


def parse_address(text: str, source: str, port: int) -> Address:
    """Reads ``host``, ``host:port`` or ``[v6]:port``; `port` where the text has none.

    Raises:
        ConfigError: It is none of them; `source` says where it stands.
    """
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]/]+))(?::(\d{1,5}))?", text)
    if match is None or int(match[3] or port) > 65535:
        raise ConfigError(f"{source}: {text!r} is no address such as 'host:{port}'")
    return Address(match[1] or match[2], int(match[3] or port))


def _completed(options: MooncakeOptions) -> MooncakeOptions:
    given = {
        "protocol": _text("MOONCAKE_PROTOCOL", "tcp").lower(),
        "device": _text("MOONCAKE_DEVICE", ""),
        "metadata": _text("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
        "host": _text("MOONCAKE_LOCAL_HOSTNAME", ""),
    }
    values: dict[str, str | Size] = {
        name: value for name, value in given.items() if getattr(options, name) is None
    }
    if options.segment is None:
        values["segment"] = _size("MOONCAKE_GLOBAL_SEGMENT_SIZE")
    if options.local_buffer is None:
        values["local_buffer"] = _size("MOONCAKE_LOCAL_BUFFER_SIZE")
    try:
        return msgspec.structs.replace(options, **values)
    except ConfigError as error:
        raise ConfigError(f"environment MOONCAKE_*: {error}") from error


def _text(name: str, default: str) -> str:
    return os.environ.get(name, "").strip() or default


def _size(name: str) -> Size:
    """Reads a size as Mooncake writes it (``4gb``, ``512m``, powers of 1024) or as we do."""
    text = _text(name, "0")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])b?", text.lower())
    if match is not None:
        return Size(float(match[1]) * _SUFFIXES[match[2]])
    try:
        return Size(parse_size(text))
    except ConfigError as error:
        raise ConfigError(f"environment {name}: {error}") from error
