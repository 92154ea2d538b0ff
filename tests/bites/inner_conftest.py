"""Keeps of each broken backend's tests those of the promise that it breaks."""

from __future__ import annotations


def _wanted(item):
    expect = item.cls.expect
    promised = any(expect in mark.args for mark in item.iter_markers("promise"))
    return expect is None or (promised and "any_sequence" not in item.name)


def pytest_collection_modifyitems(items):
    items[:] = filter(_wanted, items)
