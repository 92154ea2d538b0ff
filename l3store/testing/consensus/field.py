"""Classes of failures seen in the field, each as a scenario: what engines do, and what holds.

Find one by what you have met; each scenario's `source` is its class. What is seen, why: rule.

Values (`field_values`):

- *hit length differs*: ranks schedule on 896 and 0 pages, a batch has unequal shapes: MIN before
  any use.
- *progress differs*: partial reads of 896 and 300 pages: MIN of the progress.
- *revoke alone*: one rank is below the threshold and revokes, the other downloads: the threshold
  is tested on the agreed value.
- *timeout verdict*: 1.01 s and 0.99 s have passed of 1.0 s: the leader's clock decides for all.
- *outage on one rank*: an exception before the vote, ``Connection closed by peer`` or ``Connection
  reset by peer`` on the others: an exception is 0.
- *capacity differs*: bytes a token differ between stages: MIN at the start.
- *chunk model*: each rank fits its own timings: samples are given to all, and one pure fit.

Votes (`field_votes`):

- *order deadlock*: a vote is skipped where the local list is empty, one rank is in an all_reduce
  and another in a broadcast, ``Timed out waiting ... for recv operation to complete``: votes are
  unconditional.
- *silent mis-pair*: a skipped vote pairs with the next one of its shape, a rank reads
  ``hit_len = 1``, and there is no error: tags, or no pairing at all.
- *abort early exit*: a rank stops after ack 1 of 3: the same number of votes, or states.
- *order of tickets differs*: ranks submit A, B and B, A: the leader's order, or tags.
- *two threads, one group*: two MINs pair with each other: a group for each thread and purpose.

Pages (`field_pages`):

- *allocation on one rank*: memory fits on some ranks only: reserve, MIN, commit or give back.
- *LRU clock*: stamps of wall clocks differ by microseconds, victims diverge: a logical counter.
- *outage as a hang*: a storage call never returns: a deadline, then 0 or the progress so far; its
  pages stay out until it returns.
- *sidecar shorter*: kv has 10 pages, the indexer 7: clamp to what the pools agree on.
- *second attempt*: a requeued request meets its old ack: tickets are (rid, attempt).
- *cancel before ticket*: the abort comes before the ticket: remember it.

Operations (`field_operations`):

- *pop from empty list*: ``IndexError: pop from empty list``, the leader's count exceeds a rank's
  own queue: consume what is agreed, never ``pop(0)``.
- *backup dies*: an exception ends the writer thread, backups stop, host memory is never freed:
  never vote, always ack.
- *handle leak*: memory of the leader grows while idle, sends are never awaited: await them.

`naive_votes` and `naive_calls` are what engines do, `field_script` says what happens to each rank,
`field_stage` plays it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from l3store.testing.consensus.field_operations import OPERATIONS
from l3store.testing.consensus.field_pages import PAGES
from l3store.testing.consensus.field_values import VALUES
from l3store.testing.consensus.field_votes import VOTES

if TYPE_CHECKING:
    from l3store.testing.consensus.scenario import Scenario

__all__ = ["FIELD"]

FIELD: tuple[Scenario, ...] = (*VALUES, *VOTES, *PAGES, *OPERATIONS)
"""All of them."""
