"""Measures a backend: throughput, CPU and latency, against memcpy in the same run.

`plan` says what is measured, `engine` measures it, `ruler` is the memcpy, `medium` knows where a
store's bytes lie and proves whether a read came from the device.
"""

from __future__ import annotations

from l3store.bench.engine import bench
from l3store.bench.plan import OPS, BenchResult, Plan, Row

__all__ = ["OPS", "BenchResult", "Plan", "Row", "bench"]
