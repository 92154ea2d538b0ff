"""The seeded simulation of a whole group: every rank in one process, in virtual time."""
