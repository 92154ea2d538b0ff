"""Wrappers: each takes any backend and is one, and does one thing more.

| wrapper | adds |
|---|---|
| `Verify` | a page that is wrong is a miss, is counted by reason, and is removed |
| `Deadline` | no call outlasts its deadline, no late call touches the caller's memory |
| `Breaker` | a store that does not answer is left alone for a while |
| `Metered` | counts calls, pages, bytes, seconds and errors |
| `Faulty` | deterministic faults, for tests |
| `Latency` | a slower store, for tests and benchmarks |
"""

from __future__ import annotations

from l3store.wrap.breaker import Breaker
from l3store.wrap.deadline import Deadline
from l3store.wrap.faulty import Faulty
from l3store.wrap.latency import Latency
from l3store.wrap.metered import Metered
from l3store.wrap.verify import Verify

__all__ = ["Breaker", "Deadline", "Faulty", "Latency", "Metered", "Verify"]
