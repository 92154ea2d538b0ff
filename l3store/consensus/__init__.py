"""The consensus core: what ranks agree on before it may reach scheduling.

A group of ranks is one replicated state machine. Read in this order:

- `values`: the data: spans, facts, bounds, records, effects. `protocol`: the machine that decides.
- `table`: what one rank has reached. `meeting`: what the leader makes of it. `wire`: as bytes.
- `agreement`: joining, and a step. `reports` (over `tcp`) and `collective` (over `gloo`): two ways
  to the same record. `member`: a rank as an engine embeds it.
- `local`: all ranks in one process, in virtual time, seeded, with every fault.
- `models`: the chunk model of dynamic chunking, fitted once from the leader's samples.
"""
