"""Keeps of each broken backend's tests those of the promise that it breaks."""

from __future__ import annotations


def pytest_collection_modifyitems(items):
    items[:] = [
        item
        for item in items
        if any(item.cls.expect in mark.args for mark in item.iter_markers("promise"))
        and "any_sequence" not in item.name
    ]
