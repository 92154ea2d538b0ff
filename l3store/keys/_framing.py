"""Framing by type and length, so that joined values can never be read in two ways."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Value", "frame"]

Value = str | int | None | Sequence["Value"]


def frame(value: Value) -> bytes:
    """Returns an injective encoding: a tag byte, then a u64 little-endian length, then the value.

    None, "" and an empty sequence differ; so do 1 and "1".
    """
    if value is None:
        return b"N"
    if isinstance(value, str):
        data = value.encode("utf-8")
        return b"S" + len(data).to_bytes(8, "little") + data
    if isinstance(value, int):
        data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        return b"I" + len(data).to_bytes(8, "little") + data
    return b"L" + len(value).to_bytes(8, "little") + b"".join(frame(item) for item in value)
