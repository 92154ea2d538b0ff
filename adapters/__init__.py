"""Adapters: L3Store as a part of an engine. One package an engine; each needs that engine."""
