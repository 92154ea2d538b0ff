"""Configuration: store URLs, sizes, durations, and where an option's value comes from.

One precedence, highest first: the URL's option, the environment
(``L3STORE_<SECTION>_<OPTION>``), the TOML file that ``L3STORE_CONFIG`` names
(``[<section>] option = value``), the default. The section is the URL's scheme, or ``stack`` for the
options of the wrappers. An unknown option is an error in all three places.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from l3store.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "STACK_OPTIONS",
    "Duration",
    "Size",
    "StackOptions",
    "StoreURL",
    "is_secret",
    "load_options",
    "parse_duration",
    "parse_size",
    "without_secrets",
]

_SIZES = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP", start=1)
}
_DURATIONS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_LONGEST = 8760 * 3600.0
_SECRET = re.compile("password|secret|token")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class Size(int):
    """A number of bytes, written ``200GiB``, ``1.5MB`` or ``4096``."""


class Duration(float):
    """A number of seconds, written ``200ms``, ``1.5s``, ``2min`` or ``0.5``."""


def parse_size(text: str | int) -> int:
    """Returns the bytes that `text` means.

    Raises:
        ConfigError: It is no size; the message names the nearest unit.
    """
    return int(_quantity(text, _SIZES, "size", "64KiB"))


def parse_duration(text: str | float) -> float:
    """Returns the seconds that `text` means.

    Raises:
        ConfigError: It is no duration; the message names the nearest unit.
    """
    return float(_quantity(text, _DURATIONS, "duration", "1.5s"))


def _quantity(text: str | float, units: Mapping[str, float], what: str, example: str) -> float:
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ConfigError(f"{text!r} is not a {what}, such as {example!r}")
    match = _NUMBER.fullmatch(str(text).strip())
    if not match:
        raise ConfigError(f"{text!r} is not a {what}, such as {example!r}")
    number, unit = match.groups()
    if unit and unit not in units:
        raise ConfigError(f"unknown unit {unit!r} in {what} {text!r}{nearest(unit, units)}")
    factor = units.get(unit, 1)
    value = float(number) * factor if "." in number else int(number) * factor
    if what == "size" and value != int(value):
        raise ConfigError(f"size {text!r} is not a whole number of bytes")
    return value


@dataclass(frozen=True, slots=True)
class StoreURL:
    """A store's address: ``scheme://host:port/path?option=value``."""

    scheme: str
    host: str = ""
    port: int | None = None
    path: str = ""
    """Begins with a slash, or is empty. Percent-decoded."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str) -> StoreURL:
        """Reads a URL.

        Raises:
            ConfigError: It has no scheme, a bad port, or an option twice.
        """
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:  # whose own words may hold half of a password
            raise ConfigError(
                f"store URL {_shown(text)!r}: host or port cannot be read; a port is 0 to 65535, "
                "and in a user's name or password : / ? # @ are written %3A %2F %3F %23 %40"
            ) from None
        if not parts.scheme or not text[len(parts.scheme) :].startswith("://"):
            raise ConfigError(
                f"{_shown(text)!r} is not a store URL: it must be scheme://..., "
                "such as nvme:///mnt/nvme0/l3, file:///mnt/l3 or memory://"
            )
        if parts.fragment:
            raise ConfigError(f"store URL {_shown(text)!r}: '#' must be written %23")
        if "\0" in (path := unquote(parts.path)):
            raise ConfigError(f"store URL {_shown(text)!r}: its path holds a zero byte")
        options: dict[str, str] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in options:
                raise ConfigError(f"store URL {_shown(text)!r}: option {name!r} stands twice")
            options[name] = value
        return cls(
            scheme=parts.scheme,
            host=parts.hostname or "",
            port=port,
            path=path,
            options=options,
            username=None if parts.username is None else unquote(parts.username),
            password=None if parts.password is None else unquote(parts.password),
        )

    def without(self, names: frozenset[str]) -> StoreURL:
        """Returns the URL without the options `names`."""
        kept = {name: value for name, value in self.options.items() if name not in names}
        return replace(self, options=kept)

    def __str__(self) -> str:
        """Returns scheme, host and path for messages: no password, no options."""
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path}"


def _shown(text: str) -> str:
    """Hides a password and all options, also in text that is no URL."""
    text = re.sub(r"^((?:[^:/@]*:/+)?[^/@:?#]*):.*@", r"\1:***@", text, flags=re.DOTALL)
    return re.sub(r"[?#].+", "...", text, flags=re.DOTALL)


class StackOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the wrappers around every backend; each may stand in any store URL."""

    deadline: Duration = Duration(5.0)
    """No call lasts longer (DESIGN: promise 6)."""
    late: Literal["wait", "staged", "pending", "default"] = "default"
    """What happens to a call past its deadline that cannot be interrupted; ``default`` is what the
    backend's capabilities say."""
    breaker_failures: int = 3
    """Unavailable or late calls in a row that open the breaker."""
    breaker_cooldown: Duration = Duration(0.5)
    """Time until the open breaker lets one call probe; doubles up to `breaker_max_cooldown`."""
    breaker_max_cooldown: Duration = Duration(30.0)

    def __post_init__(self) -> None:
        seconds = ("deadline", "breaker_cooldown", "breaker_max_cooldown")
        for name in (*seconds, "breaker_failures"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"option {name!r} must be positive, not {getattr(self, name)}")
        for name in seconds:  # locks cannot wait much longer
            if getattr(self, name) > _LONGEST:
                raise ConfigError(f"option {name!r} is at most 8760h, not {getattr(self, name)} s")


STACK_OPTIONS = frozenset(StackOptions.__struct_fields__)
"""Names that belong to the wrappers, whatever the scheme."""

Options = TypeVar("Options", bound=msgspec.Struct)


def load_options(
    kind: type[Options],
    section: str,
    given: Mapping[str, Any],
    *,
    given_by: str = "",
    elsewhere: str = "",
) -> Options:
    """Returns the options of one section, each from the highest place that names it.

    Args:
        kind: A msgspec struct; fields of type `Size` and `Duration` take texts such as ``8GiB``.
        section: The scheme, or ``stack``.
        given: Options of the URL, or of whatever stands in its place.
        given_by: What messages call `given`; "" for the URL.
        elsewhere: Path of a TOML file to use in place of the one that ``L3STORE_CONFIG`` names.

    Raises:
        ConfigError: An option is unknown or its value invalid; the message names it, where it
            stands, and the nearest valid choice.
    """
    known = get_type_hints(kind)
    values: dict[str, Any] = {}
    for source, found in (
        *_file_options(section, elsewhere),
        (f"environment L3STORE_{section.upper()}_*", _environment(section)),
        (given_by or f"URL of {section}", given),
    ):
        for name, value in found.items():
            if name not in known and name in STACK_OPTIONS:
                raise ConfigError(
                    f"option {name!r} ({source}) belongs to section 'stack': "
                    f"L3STORE_STACK_{name.upper()}, [stack] in a file, or any store's URL"
                )
            if name not in known:
                raise ConfigError(
                    f"unknown option {name!r} ({source}){nearest(name, {*known, *STACK_OPTIONS})}"
                )
            values[name] = _converted(name, value, known[name], source)
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"options of {section}: {error}") from error


def is_secret(name: str) -> bool:
    """Returns whether the value of option `name` is nothing that others should see."""
    return _SECRET.search(name) is not None


def without_secrets(options: msgspec.Struct) -> str:
    """Returns the `repr` of options, but not what a password, secret or token is."""
    fields = (
        f"{name}={'...' if value and is_secret(name) else repr(value)}"
        for name, value in msgspec.structs.asdict(options).items()
    )
    return f"{type(options).__name__}({', '.join(fields)})"


def _converted(name: str, value: Any, kind: Any, source: str) -> Any:
    try:
        if get_origin(kind) is Literal and value not in get_args(kind):
            choices = [str(choice) for choice in get_args(kind)]
            raise ConfigError(f"{value!r} is not one of its values{nearest(str(value), choices)}")
        return msgspec.convert(value, kind, strict=False, dec_hook=_from_text)
    except (ConfigError, msgspec.ValidationError) as error:
        shown = "..." if is_secret(name) else repr(value)
        raise ConfigError(f"option {name!r} ({source}) = {shown}: {error}") from error


def _from_text(kind: type, value: Any) -> Any:
    if kind is Size:
        return Size(parse_size(value))
    if kind is Duration:
        return Duration(parse_duration(value))
    raise NotImplementedError(f"options of type {kind}")


def _environment(section: str) -> dict[str, str]:
    prefix = f"L3STORE_{section.upper()}_"
    return {
        name[len(prefix) :].lower(): value
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }


def _file_options(section: str, path: str) -> list[tuple[str, Mapping[str, Any]]]:
    path = path or os.environ.get("L3STORE_CONFIG", "")
    if not path:
        return []
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration file {path!r}: {error}") from error
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"configuration file {path!r}: [{section}] is not a table")
    return [(f"[{section}] of {path}", table)]
