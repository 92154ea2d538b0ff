"""The consensus core: what ranks agree on before it may reach scheduling.

A group of ranks is one replicated state machine. Read in this order:

- `values`: the data: spans, facts, bounds, records, effects. `protocol`: the machine that decides.
- `table`: what one rank has reached. `meeting`: what the leader makes of it. `wire`: as bytes.
- `member`: a rank as an engine embeds it. `agreement`: joining, and a step.
- `reports`: one way to a record, over `tcp` (`tcp_leader`, `tcp_follower`, `tcp_end`, `frames`).
- `collective`: the other one, of `votes` and `state`, over `gloo` (`gloo_groups`, `beats`).
- `local`: the links of a group in one process, in virtual time, seeded.
- `sidecars`: what a rank's pools let it say as its hit. `models`: the chunk model of dynamic
  chunking, fitted once from the leader's samples.
"""
