"""The grammar of object names, and the one place where it is checked.

A name that passes here can neither climb out of a directory nor be split in two ways: every part
starts with a letter or digit, and none but the separator is a slash.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NAMESPACE_MAX",
    "check_keys",
    "check_meta_name",
    "check_place",
    "object_name",
    "split_key",
]

NAMESPACE_MAX = 96
_NAMESPACE = r"[a-z0-9][a-z0-9._-]{0,95}"
_POOL = r"[a-z0-9][a-z0-9_]{0,47}"
_SHARD = r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}"
_HASH_DIGITS = 64

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
    """Accepts a batch of object names, or raises. About 0.2 us a key where one place repeats.

    Raises:
        ValueError: A key is outside the grammar.
    """
    prefix, length = "", -1
    for key in keys:
        if len(key) != length or not key.startswith(prefix):
            prefix = check_place(key.rpartition("/")[0]) + "/"
            length = len(prefix) + _HASH_DIGITS
            if len(key) != length:
                raise _no_hash(key)
    digits = "".join([key[-_HASH_DIGITS:] for key in keys])
    if not _is_hex(digits):
        raise _no_hash(next(key for key in keys if not _is_hex(key[-_HASH_DIGITS:])))


def _is_hex(digits: str) -> bool:
    try:
        # fromhex alone would let upper case and white space through.
        return bytes.fromhex(digits).hex() == digits
    except ValueError:
        return False


def _no_hash(key: str) -> ValueError:
    digits = key.rpartition("/")[2]
    return ValueError(f"page hash {digits!r} of {key!r} must be 64 of the digits 0-9a-f")


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
    if len(page_hash) * 2 != _HASH_DIGITS:
        raise ValueError(f"a page hash has 32 bytes, not {len(page_hash)}")
    return f"{check_place(place)}/{page_hash.hex()}"
