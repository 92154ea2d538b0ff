"""The chunk model of dynamic chunking under pipeline parallelism: fitted once, alike on all ranks.

With a long history the attention of a chunk costs more, so that chunks of equal length keep later
pipeline stages waiting. Stage 0 measures the latency of chunks of several lengths, and chunks are
then cut so that each takes about as long as one of the base length without a history. The lengths
decide what every rank computes next: ranks that fit their own timings cut differently and diverge.
So the raw samples of one rank are given to all, and each fits them by the same deterministic
arithmetic. A prediction is a pure function of the history: no communication while serving.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

from l3store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST_SAMPLES", "ChunkModel", "Curve", "fit"]

MOST_SAMPLES = 128
LEAST_SAMPLES = 8
"""Left after the first one, which pays for warming up, is dropped."""
SMOOTHING = 0.75
"""How far a chunk goes from the base length towards the one of equal latency."""
MULTIPLE = 64
"""Tokens; chunks are whole multiples of it, or of a larger page."""
RESERVE = 100
"""Tokens at the end of the context that no chunk goes into."""

_log = logging.getLogger(__name__)


class Curve(NamedTuple):
    """Seconds that the first `l` tokens of a prompt take: ``a l^2 + b l + c``."""

    a: float
    b: float
    c: float


def fit(samples: Sequence[tuple[int, float]]) -> Curve:
    """Returns the least-squares curve through samples of (tokens, seconds), the first one dropped.

    Plain floats with exact sums: the same samples give the same bits on every machine.

    Raises:
        ValueError: Fewer than 8 samples are left, one is not finite or not positive, lengths do not
            tell a curve, or latency does not grow faster than length.
    """
    kept = samples[1:]
    if len(kept) < LEAST_SAMPLES:
        raise ValueError(f"{len(kept)} samples after the first, at least {LEAST_SAMPLES}")
    for tokens, seconds in kept:
        if not (0 < tokens < math.inf and 0 < seconds < math.inf):
            raise ValueError(f"sample {(tokens, seconds)} is not finite and positive")
    longest = max(tokens for tokens, _ in kept)
    lengths = [tokens / longest for tokens, _ in kept]  # in 0 to 1, or powers of 4 lose the digits
    latencies = [seconds for _, seconds in kept]
    powers = [math.fsum([u**n for u in lengths]) for n in range(5)]
    sides = [
        math.fsum([t * u**n for u, t in zip(lengths, latencies, strict=True)]) for n in range(3)
    ]
    rows = [[powers[4 - i - j] for j in range(3)] + [sides[2 - i]] for i in range(3)]
    a, b, c = _solved(rows)
    curve = Curve(a / longest**2, b / longest, c)
    if not curve.a > 0:
        raise ValueError(f"latency does not grow faster than length: a = {curve.a:g}")
    return curve


def _solved(rows: list[list[float]]) -> list[float]:
    """Returns the solution of three linear equations, by elimination with pivots."""
    for at in range(3):
        pivot = max(range(at, 3), key=lambda i: abs(rows[i][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        if abs(rows[at][at]) < 1e-12:
            raise ValueError("the lengths of the samples do not tell a curve")
        for i in range(at + 1, 3):
            factor = rows[i][at] / rows[at][at]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[at], strict=True)]
    found = [0.0, 0.0, 0.0]
    for at in (2, 1, 0):
        rest = math.fsum([rows[at][j] * found[j] for j in range(at + 1, 3)])
        found[at] = (rows[at][3] - rest) / rows[at][at]
    return found


class ChunkModel:
    """Lengths of the next chunk, the same on every rank that was given the same samples.

    Pure after it was made, and thread-safe. Samples that cannot be fitted are told in one warning,
    and every chunk is the base length.

    Args:
        samples: (tokens, seconds) of the leader, at most 128, longest first.
        base: Tokens of a chunk without a history.
        page: Tokens of a page.
        context: Tokens that the model takes.

    Raises:
        ConfigError: A size is not positive, or there are more than 128 samples.
    """

    def __init__(
        self, samples: Sequence[tuple[int, float]], *, base: int, page: int, context: int
    ) -> None:
        for name, value in (("base", base), ("page", page), ("context", context)):
            if value < 1:
                raise ConfigError(f"{name} must be positive, not {value}")
        if len(samples) > MOST_SAMPLES:
            raise ConfigError(f"{len(samples)} samples, at most {MOST_SAMPLES}")
        self._base, self._context = base, context
        self._multiple = max(page, MULTIPLE)
        self.curve: Curve | None = None
        try:
            self.curve = fit(samples)
        except (ValueError, OverflowError) as error:
            _log.warning("dynamic chunking stays at %d tokens a chunk: %s", base, error)

    def length(self, history: int) -> int:
        """Returns the tokens of the next chunk behind `history` tokens. Does not block.

        A whole multiple of the page (64 at least), not below a quarter of the base, not into the
        last 100 tokens of the context; the base length where there is no such one.

        Raises:
            ValueError: `history` is negative.
        """
        if history < 0:
            raise ValueError(f"a history of {history} tokens")
        same = self._same_latency(history)
        if same is None:
            return self._base
        wanted = max(self._base + SMOOTHING * (same - self._base), self._base / 4)
        room = self._context - history - RESERVE
        chunk = min(self._floored(wanted), self._floored(room))
        return chunk if chunk >= self._multiple else self._base

    def _same_latency(self, history: int) -> float | None:
        """Solves ``f(history + x) - f(history) = f(base) - f(0)`` for x."""
        if self.curve is None:
            return None
        a, b, _ = self.curve
        slope = 2 * a * history + b
        latency = a * self._base**2 + b * self._base
        inner = slope * slope + 4 * a * latency
        if not 0 <= inner < math.inf:
            return None
        same = (math.sqrt(inner) - slope) / (2 * a)
        return same if 0 < same < math.inf else None

    def _floored(self, tokens: float) -> int:
        return int(tokens // self._multiple) * self._multiple
