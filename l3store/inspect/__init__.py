"""Walks a store without the engine: what it holds, and what of it is damaged."""
