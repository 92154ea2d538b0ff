"""The pytest plugin: assert rewriting, the marker ``promise``, and the matrix backend x promise.

Loaded by entry point in every pytest run where L3Store is installed; silent unless the suite runs.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

__all__ = ["PROMISES", "LacksCapability", "NotHere"]

pytest.register_assert_rewrite(
    "l3store.testing.backend",
    "l3store.testing.kit",
    "l3store.testing.stateful",
    "l3store.testing.suite_bounds",
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


_seen: dict[tuple[str, int], list[str]] = defaultdict(list)


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker."""
    config.addinivalue_line(
        "markers", "promise(n): fails when promise n of the backend contract is broken"
    )


def _promises(item: pytest.Item) -> list[int]:
    return [n for mark in item.iter_markers("promise") for n in mark.args]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip that no missing capability explains into a failure, and keeps the outcome."""
    report = yield
    promises = _promises(item)
    if not promises:
        return report
    if report.skipped and not _excused(call):
        report.outcome = "failed"
        report.longrepr = f"a test of the suite may not be skipped: {report.longrepr}"
    if report.when == "call" or report.outcome != "passed":
        said = str(call.excinfo.value) if report.skipped and call.excinfo else ""
        owner = getattr(item, "cls", None)
        name = owner.__name__ if owner is not None else item.nodeid
        for promise in promises:
            _seen[name, promise].append(f"skipped: {said}" if said else report.outcome)
    return report


def _excused(call: pytest.CallInfo[None]) -> bool:
    if call.excinfo is None:
        return False
    if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
        return call.excinfo.errisinstance(LacksCapability)
    return call.excinfo.errisinstance((LacksCapability, NotHere))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a line for each promise and a column for each backend."""
    if not _seen:
        return
    backends = sorted({name for name, _ in _seen})
    width = max(len(text) for text in PROMISES.values()) + 4
    terminalreporter.section("L3Store backend contract")
    terminalreporter.line(" " * width + "".join(f"{name:>16}" for name in backends))
    for promise, text in PROMISES.items():
        cells = [_cell(_seen.get((name, promise), [])) for name in backends]
        terminalreporter.line(f"{promise:>2}  {text:<{width - 4}}" + "".join(cells))
    for line in sorted(set(_skips())):
        terminalreporter.line(line)


def _cell(outcomes: Iterable[str]) -> str:
    outcomes = list(outcomes)
    failed = sum(outcome == "failed" for outcome in outcomes)
    passed = sum(outcome == "passed" for outcome in outcomes)
    skipped = len(outcomes) - failed - passed
    text = f"FAIL {failed}" if failed else f"pass {passed}" if passed else "-"
    return f"{text + (f' skip {skipped}' if skipped else ''):>16}"


def _skips() -> Iterable[str]:
    for (name, promise), outcomes in _seen.items():
        for outcome in outcomes:
            if outcome.startswith("skipped: "):
                yield f"{name}, promise {promise}, {outcome}"
