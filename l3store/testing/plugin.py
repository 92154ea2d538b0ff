"""The pytest plugin: assert rewriting, the marker ``promise``, and the matrix backend x promise.

Loaded by entry point in every pytest run where L3Store is installed; silent unless the suite runs.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

__all__ = ["PROMISES", "LacksCapability", "NotHere"]

pytest.register_assert_rewrite(
    "l3store.testing.backend",
    "l3store.testing.consensus.suite",
    "l3store.testing.faults",
    "l3store.testing.kit",
    "l3store.testing.stateful",
    "l3store.testing.suite_bounds",
    "l3store.testing.suite_hostile",
    "l3store.testing.suite_late",
    "l3store.testing.suite_names",
    "l3store.testing.suite_pages",
    "l3store.testing.suite_sharing",
    "l3store.testing.topology",
)

PROMISES = {
    1: "a page is visible whole or not at all",
    2: "True means every byte, from that key",
    3: "setting again succeeds; damage heals",
    4: "order, duplicates, prefix, batches",
    5: "threads and processes share",
    6: "no call outlasts its deadline",
    7: "absent is a miss, unreachable an error",
    8: "no copy, buffers are the caller's",
    9: "hostile names and lengths",
    10: "nothing is touched after return",
    11: "full and partial are told exactly",
    12: "names, lengths, descriptors, close",
}
"""The promises of the backend contract, in short."""


if TYPE_CHECKING:
    _Skipped = Exception
else:
    _Skipped = pytest.skip.Exception  # made at run time, so types do not know it


class LacksCapability(_Skipped):
    """The backend does not declare the capability that a test is about."""


class NotHere(_Skipped):
    """This machine lacks what a test needs; with L3STORE_REQUIRE_SERVICES=1 that is a failure."""


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker, and collects what the suite's tests say."""
    config.addinivalue_line(
        "markers", "promise(n): fails when promise n of the backend contract is broken"
    )
    config.pluginmanager.register(_Matrix())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip that no missing capability explains into a failure, and adds the promise."""
    report = yield
    promises = [n for mark in item.iter_markers("promise") for n in mark.args]
    if not promises:
        return report
    if report.skipped and not _excused(call):
        report.outcome = "failed"
        report.longrepr = f"a test of the suite may not be skipped: {report.longrepr}"
    if report.failed:
        lines = "\n".join(f"promise {n}: {PROMISES[n]}" for n in promises)
        report.sections.append(("L3Store backend contract", lines))
    if report.when == "call" or not report.passed:
        owner = getattr(item, "cls", None)
        said = str(call.excinfo.value) if report.skipped and call.excinfo else ""
        name = owner.__name__ if owner is not None else item.nodeid
        # A property travels with the report, also out of a worker process of pytest-xdist.
        report.user_properties.append(("l3store", [name, promises, said]))
    return report


def _excused(call: pytest.CallInfo[None]) -> bool:
    if call.excinfo is None:
        return False
    if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
        return call.excinfo.errisinstance(LacksCapability)
    return call.excinfo.errisinstance((LacksCapability, NotHere))


class _Matrix:
    """A line for each promise, a column for each backend."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[str]] = defaultdict(list)
        self._skips: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the outcome of a test of the suite."""
        for key, value in report.user_properties:
            if key == "l3store" and isinstance(value, list):
                self._keep(report.outcome, *value)

    def _keep(self, outcome: str, name: str, promises: Iterable[int], said: str) -> None:
        for promise in promises:
            self._seen[name, promise].append(outcome)
            if outcome == "skipped":
                self._skips.add(f"{name}, promise {promise}, skipped: {said}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the matrix, and why tests were skipped."""
        if not self._seen:
            return
        backends = sorted({name for name, _ in self._seen})
        width = max(len(text) for text in PROMISES.values()) + 4
        widths = {name: max(16, len(name) + 2) for name in backends}
        terminalreporter.section("L3Store backend contract")
        head = "".join(f"{name:>{widths[name]}}" for name in backends)
        terminalreporter.line(" " * width + head)
        for promise, text in PROMISES.items():
            cells = [
                f"{_cell(self._seen.get((name, promise), [])):>{widths[name]}}" for name in backends
            ]
            terminalreporter.line(f"{promise:>2}  {text:<{width - 4}}" + "".join(cells))
        for line in sorted(self._skips):
            terminalreporter.line(line)


def _cell(outcomes: Sequence[str]) -> str:
    failed, passed = outcomes.count("failed"), outcomes.count("passed")
    skipped = outcomes.count("skipped")
    text = f"FAIL {failed}" if failed else f"pass {passed}" if passed else ""
    return f"{text} {f'skip {skipped}' if skipped else ''}".strip() or "-"
