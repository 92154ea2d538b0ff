"""The consensus core: what ranks agree on before it may reach scheduling.

- `models`: the chunk model of dynamic chunking, fitted once from the leader's samples.
"""
