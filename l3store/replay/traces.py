"""Reads a trace: one JSON object a line, as the Mooncake FAST'25 release writes it.

``timestamp`` (ms since start), ``input_length``, ``output_length`` (tokens), ``hash_ids`` (one id
for each 512-token block of the prompt, in order; equal ids mean the same block after the same
prefix).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import msgspec

from l3store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["BLOCK_TOKENS", "BadLine", "Request", "read_trace"]

BLOCK_TOKENS = 512


class Request(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]]
    """An i64 each, as the page hash frames them."""


class BadLine(ConfigError):
    """A line that is no request, or contradicts an earlier one.

    Attributes:
        line: Its number, from 1.
        reason: What is wrong with it.
    """

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"trace line {line}: {reason}")
        self.line, self.reason = line, reason


def read_trace(
    lines: Iterable[bytes], *, on_bad: Callable[[BadLine], None] | None = None
) -> Iterator[Request]:
    """Yields the requests of a trace as they are read; holds one parent an id, no requests.

    Args:
        lines: Such as a file opened in binary mode. Blank lines are passed over.
        on_bad: Called for a bad line, which is then left out; None: it is raised.

    Raises:
        BadLine: A line is not JSON, lacks a field, has another type in it or an id outside i64,
            repeats an id, or has an id that followed another parent before.
    """
    parents: dict[int, int | None] = {}
    decode = msgspec.json.Decoder(Request).decode
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = decode(line)
            reason = _fault(request, parents)
        except msgspec.ValidationError as error:
            reason = str(error)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = f"not JSON: {error}"
        except RecursionError:
            reason = "nested too deeply"
        if reason is None:
            parents.update(zip(request.hash_ids, [None, *request.hash_ids], strict=False))
            yield request
        elif on_bad is None:
            raise BadLine(number, reason)
        else:
            on_bad(BadLine(number, reason))


def _fault(request: Request, parents: dict[int, int | None]) -> str | None:
    ids = request.hash_ids
    if len(set(ids)) != len(ids):
        times = Counter(ids)
        twice = next(block for block in ids if times[block] > 1)
        return f"id {twice} stands twice in hash_ids"
    before: int | None = None
    for block in ids:
        known = parents.get(block, before)
        if known != before:
            return f"id {block} follows {_called(before)}, but followed {_called(known)} before"
        before = block
    return None


def _called(block: int | None) -> str:
    return "the start" if block is None else f"id {block}"
