"""Replays traces of real prompts over a store, and checks every byte that comes back.

`traces` reads a trace, `synthetic` makes one of the same shape, `payload` makes pages that tell
which page they are, `engine` drives the store.
"""

from __future__ import annotations

from l3store.replay.engine import ReplayResult, replay
from l3store.replay.synthetic import synthetic_trace
from l3store.replay.traces import BadLine, Request, read_trace

__all__ = ["BadLine", "ReplayResult", "Request", "read_trace", "replay", "synthetic_trace"]
