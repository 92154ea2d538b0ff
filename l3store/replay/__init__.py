"""Replays traces of real prompts over a store."""
