"""A seeded trace of the shape of the real one, for machines that lack it.

Conversations: a request begins one (a shared system block, then fresh blocks) or continues one
(all its blocks, then new ones). The numbers were fitted to the Mooncake conversation trace:

| | real, 12,031 requests | synthetic, 12,000, seed 1 |
|---|---|---|
| blocks a request: mean, 50, 90, 99 %, most | 24.0, 14, 54, 167, 247 | 25.1, 14, 57, 169, 247 |
| share of requests that go on with a conversation | 38.7 % | 36.0 % |
| prefix-hit share: first 1,000, 2,000, all | 21 %, 29 %, 36.6 % | 23 %, 29 %, 37.6 % |

Seeds 1 to 3 lie at 19 to 23 %, 25 to 29 %, 36.8 to 37.6 %.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from l3store.replay.traces import BLOCK_TOKENS, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["synthetic_trace"]

_ARRIVALS_MS = 3000  # the real trace arrives in bursts, one each 3 s
_BURST = 10
_CONTINUE = 0.39  # share of requests that go on with a conversation, once there are enough
_WARM_UP = 900  # requests: what goes on from before the trace's start is new in it
_MOST_BLOCKS = 247


def synthetic_trace(seed: int, requests: int) -> Iterator[Request]:
    """Yields `requests` requests; the same ones for a seed on every machine and Python version.

    Only `random.Random.random` is used: of the module's functions it alone is promised to repeat.
    """
    rng = random.Random(seed)
    conversations: list[list[int]] = []
    fresh = 1  # id 0 is the system block
    for number in range(requests):
        goes_on = _CONTINUE * (1.0 - math.exp(-(number + 150) / _WARM_UP))
        if rng.random() >= goes_on or not conversations:
            blocks = [0]
            grown = _lognormal(rng, median=10.0, sigma=1.2)
        else:
            # Recent ones go on more often: the square leans towards the end of the list.
            at = len(conversations) - 1 - int(rng.random() ** 2 * len(conversations))
            blocks = conversations.pop(at)
            grown = _lognormal(rng, median=3.1, sigma=1.4)
        grown = max(1, min(round(grown), _MOST_BLOCKS - len(blocks)))
        blocks = [*blocks, *range(fresh, fresh + grown)][:_MOST_BLOCKS]
        fresh += grown
        if len(blocks) < _MOST_BLOCKS:
            conversations.append(blocks)
        yield Request(
            timestamp=number // _BURST * _ARRIVALS_MS,
            input_length=len(blocks) * BLOCK_TOKENS - int(rng.random() * BLOCK_TOKENS),
            output_length=1 + int(_lognormal(rng, median=350.0, sigma=0.7)),
            hash_ids=blocks,
        )


def _lognormal(rng: random.Random, *, median: float, sigma: float) -> float:
    # Box-Muller: random.lognormvariate may change between Python versions.
    normal = math.sqrt(-2.0 * math.log(1.0 - rng.random())) * math.cos(math.tau * rng.random())
    return median * math.exp(sigma * normal)
