"""The grammar of object names, and the one place where it is checked.

A name that passes here can neither climb out of a directory nor be split in two ways: every part
starts with a letter or digit, and none but the separator is a slash.
"""

from __future__ import annotations

import re
from binascii import unhexlify
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "NAMESPACE_MAX",
    "check_keys",
    "check_meta_name",
    "check_place",
    "object_name",
    "split_key",
    "split_keys",
]

NAMESPACE_MAX = 96
_NAMESPACE = r"[a-z0-9][a-z0-9._-]{0,95}"
_POOL = r"[a-z0-9][a-z0-9_]{0,47}"
_SHARD = r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}"
_HASH_BYTES, _HASH_DIGITS = 32, 64
_AT_ONCE = 1024  # keys

_namespace = re.compile(_NAMESPACE)
_parts = (("namespace", _namespace), ("pool", re.compile(_POOL)), ("shard", re.compile(_SHARD)))


@lru_cache(maxsize=4096)
def check_place(place: str) -> str:
    """Returns `place` when it is ``<namespace>/<pool>/<shard>``.

    Raises:
        ValueError: It is not; the message names the part and its pattern.
    """
    parts = place.split("/")
    if len(parts) != len(_parts):
        raise ValueError(f"{place!r} is not a place: it must be <namespace>/<pool>/<shard>")
    for text, (name, pattern) in zip(parts, _parts, strict=True):
        if not pattern.fullmatch(text):
            raise ValueError(f"{name} {text!r} of {place!r} must match {pattern.pattern}")
    return place


def check_keys(keys: Sequence[str]) -> None:
    """Accepts a batch of object names, or raises. About 0.2 us a key where all have one place.

    Raises:
        ValueError: A key is outside the grammar.
    """
    split_keys(keys)


def split_keys(keys: Sequence[str]) -> list[tuple[str, tuple[bytes, ...]]]:
    """Returns (place, page hashes) of neighbouring keys of one place, in order.

    A long stretch may come in several parts. About 0.2 us a key where all have one place.

    Raises:
        ValueError: A key is outside the grammar.
    """
    stretches: list[tuple[str, tuple[bytes, ...]]] = []
    for at in range(0, len(keys), _AT_ONCE):
        part = keys[at : at + _AT_ONCE]
        whole = _one_place(part)
        stretches += _several_places(part) if whole is None else (whole,)
    return stretches


def _several_places(keys: Sequence[str]) -> Iterator[tuple[str, tuple[bytes, ...]]]:
    start = 0
    for at in range(1, len(keys) + 1):
        if at == len(keys) or keys[at][:-_HASH_DIGITS] != keys[start][:-_HASH_DIGITS]:
            stretch = _one_place(keys[start:at])
            if stretch is None:
                raise _outside(keys[start:at])
            yield stretch
            start = at


def _one_place(keys: Sequence[str]) -> tuple[str, tuple[bytes, ...]] | None:
    """Splits keys of one place, in few steps for all of them together; None: they are not.

    The keys are laid out as rows of equal length. No part of a good row holds the separator, so
    rows that are good are the keys.
    """
    count, length = len(keys), len(keys[0])
    try:
        rows = ("|".join(keys) + "|").encode("ascii")
    except UnicodeEncodeError:
        return None
    if length <= _HASH_DIGITS or len(rows) != count * (length + 1):
        return None
    parts = _rows(length - _HASH_DIGITS, count).unpack(rows)
    prefix, digits = parts[0], b"".join(parts[1::2])
    if parts[::2].count(prefix) != count or digits.translate(None, b"0123456789abcdef"):
        return None
    if rows[length :: length + 1] != b"|" * count or not prefix.endswith(b"/"):
        return None
    place = check_place(prefix[:-1].decode("ascii"))
    return place, _hashes(count).unpack(unhexlify(digits))


@lru_cache(maxsize=256)
def _rows(prefix: int, count: int) -> Struct:
    return Struct(f"{prefix}s{_HASH_DIGITS}sx" * count)


@lru_cache(maxsize=256)
def _hashes(count: int) -> Struct:
    return Struct(f"{_HASH_BYTES}s" * count)


def _outside(keys: Sequence[str]) -> ValueError:
    """Says which of the keys is outside the grammar, and how."""
    for key in keys:
        place, _, digits = key.rpartition("/")
        try:
            check_place(place)
        except ValueError as error:
            return error
        if len(digits) != _HASH_DIGITS or not _is_hex(digits):
            return ValueError(
                f"page hash {digits!r} of {key!r} must be {_HASH_DIGITS} of the digits 0-9a-f"
            )
    raise AssertionError("all keys are within the grammar")


def _is_hex(digits: str) -> bool:
    try:
        return bytes.fromhex(digits).hex() == digits
    except ValueError:
        return False


def split_key(key: str) -> tuple[str, str]:
    """Returns (place, page hash in hexadecimal) of a key that follows the grammar.

    Raises:
        ValueError: It does not.
    """
    check_keys((key,))
    place, _, digits = key.rpartition("/")
    return place, digits


def check_meta_name(name: str) -> str:
    """Returns `name` when it is a namespace or a place.

    Raises:
        ValueError: It is neither.
    """
    if "/" in name:
        return check_place(name)
    if not _namespace.fullmatch(name):
        raise ValueError(f"{name!r} is neither a place nor a namespace ({_NAMESPACE})")
    return name


def object_name(place: str, page_hash: bytes) -> str:
    """Returns the key of one page. `page_hash` is the 32 raw bytes.

    Raises:
        ValueError: `place` is outside the grammar or the hash has another length.
    """
    if len(page_hash) != _HASH_BYTES:
        raise ValueError(f"a page hash has 32 bytes, not {len(page_hash)}")
    return f"{check_place(place)}/{page_hash.hex()}"
