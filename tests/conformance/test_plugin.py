"""The plugin: which skips are excused, what the matrix says, and silence where it is not used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from l3store.testing.backend import BackendSuite

SUITE = """
import pytest
from l3store.testing.kit import promise
from l3store.testing.plugin import NotHere
from l3store.testing.suite import Suite

class Small(Suite):
    def url(self, tmp_path): return "memory://"
    def small_url(self, *args): return "memory://"

    @promise(4)
    def test_an_empty_batch(self, either): assert either.batch_exists([]) == 0

    @promise(7)
    def test_of_a_shared_store(self, raw): self.needs("shared")

    @promise(7, 11)
    def test_of_a_small_store(self): self.small_url()

class TestGood(Small): pass

@pytest.mark.skip(reason="another day")
class TestPutOff(Small): pass

@pytest.mark.xfail(reason="a known fault", strict=False)
class TestForgiven(Small):
    def url(self, tmp_path): return "memory://?capacity=1"

class TestSkipsInAHelper(Small):
    def small_url(self, *args): pytest.skip("no small store")

class TestNotOnThisMachine(Small):
    def small_url(self, *args): raise NotHere("nothing can be mounted")
"""

NOT_A_SUITE = """
import pytest
def test_passes(): pass
@pytest.mark.skip(reason="their own business")
def test_skipped(): pass
"""


def _run(folder, text, *, required=""):
    (folder / "test_it.py").write_text(text)
    command = [
        sys.executable, "-m", "pytest", str(folder), "--rootdir", str(folder), "-q", "-rA",
        "-p", "no:cacheprovider", "-p", "no:valkey",
    ]  # fmt: skip
    environment = os.environ | {"L3STORE_REQUIRE_SERVICES": required}
    return subprocess.run(command, capture_output=True, text=True, env=environment).stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("suite"), SUITE)


def _cells(said, promise):
    """The cells of a promise's line by backend, such as ``pass 2`` or ``FAIL 1 skip 4``."""
    matrix = said[said.index("= L3Store backend contract") :].splitlines()
    names = matrix[1].split()
    (line,) = [line for line in matrix if line.startswith(f"{promise:>2}  ")]
    cells, ends = {}, [matrix[1].index(name) + len(name) for name in names]
    for name, start, end in zip(names, [0, *ends], ends, strict=False):
        cells[name] = line[max(start, 42) : end].strip()
    return cells


def test_the_matrix_counts_what_passed_and_what_a_missing_capability_explains(said):
    assert _cells(said, 4)["TestGood"] == "pass 2"
    assert _cells(said, 7)["TestGood"] == "pass 1 skip 1"
    assert _cells(said, 11)["TestGood"] == "pass 1"
    assert _cells(said, 1)["TestGood"] == "-"
    assert "TestGood, promise 7, skipped: no capability 'shared'" in said


@pytest.mark.parametrize(
    ("promise", "name", "cell"),
    [
        (4, "TestPutOff", "FAIL 2"),
        (4, "TestForgiven", "FAIL 2"),
        (7, "TestSkipsInAHelper", "FAIL 1 skip 1"),
        (11, "TestSkipsInAHelper", "FAIL 1"),
    ],
)
def test_a_skip_that_no_capability_explains_fails(said, promise, name, cell):
    assert _cells(said, promise)[name] == cell
    assert "a test of the suite may not be skipped" in said


def test_a_machine_that_lacks_something_is_excused_unless_services_are_required(said, tmp_path):
    assert _cells(said, 11)["TestNotOnThisMachine"] == "skip 1"
    assert "TestNotOnThisMachine, promise 11, skipped: nothing can be mounted" in said
    strict = _run(tmp_path, SUITE, required="1")
    assert _cells(strict, 11)["TestNotOnThisMachine"] == "FAIL 1"
    assert _cells(strict, 7)["TestGood"] == "pass 1 skip 1"


def test_a_failure_names_its_promise(said):
    assert "promise 11: full and partial are told exactly" in said


def test_projects_without_the_suite_hear_nothing(tmp_path):
    said = _run(tmp_path, NOT_A_SUITE)
    assert "1 passed, 1 skipped" in said
    assert "L3Store" not in said
    assert "promise" not in said


def test_a_test_of_the_suite_cannot_be_replaced():
    with pytest.raises(TypeError, match="TestLess replaces test_absent_is_a_plain_miss"):
        type("TestLess", (BackendSuite,), {"test_absent_is_a_plain_miss": lambda self: None})
    with pytest.raises(TypeError, match="test_threads_share_a_store"):
        type("TestLess", (BackendSuite,), {"test_threads_share_a_store": None})


def test_a_backend_may_have_tests_of_its_own():
    assert type("TestMore", (BackendSuite,), {"test_mine": lambda self: None})
