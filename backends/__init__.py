"""The backends that L3Store ships: one file or folder each, found by entry point."""
