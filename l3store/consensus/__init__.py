"""The consensus core: what ranks agree on before it may reach scheduling.

A group of ranks is one replicated state machine; docs/consensus.md tells how it works. The whole of
it is an hour's reading, in this order:

- `values`: the data: spans, facts, bounds, records, effects. `protocol`: the machine that decides.
- `member`: a rank as an engine embeds it. `table`: what it has reached, as its I/O threads say.
- `meeting`: what the leader makes of all tables. `agreement`: joining, and a step. `reports`: the
  default way to a record.

What these stand on, to be looked up:

- `wire`: facts and records as bytes. `tcp`: what carries them (`tcp_leader`, `tcp_follower`,
  `tcp_end`, `frames`).
- `collective`: the other way to a record, of `votes` and `state`, over `gloo` (`gloo_groups`,
  `beats`).
- `local`: the links of a group in one process, in virtual time, seeded.
- `sidecars`: what a rank's pools let it say as its hit. `models`: the chunk model of dynamic
  chunking, fitted once from the leader's samples.
"""
