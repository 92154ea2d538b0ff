"""What is wrong on the command line is said there: no seed and no code runs that nobody meant."""

from __future__ import annotations

import sys

import pytest

from l3store.testing.simulation import __main__ as command


@pytest.fixture
def said(monkeypatch, capsys):
    """Runs the command; returns its exit code and what it wrote to stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["simulation", "--workers", "1", *words])
        try:
            code = command.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("seeds", ["5:5", "5:1", "a:b", "1:2:3", "1:", ":3", "", "-1:2", "1.5"])
def test_seeds_that_are_none_are_refused(said, seeds):
    code, out, err = said(f"--seeds={seeds}")
    assert (code, out) == (2, "")
    assert f"{seeds!r} names no seeds: it is FIRST:LAST" in err


def test_a_range_ends_before_its_last(said):
    code, out, _ = said("--seeds", "0:3", "--policy", "reports")
    assert out.startswith("3 runs, ")
    assert code == 1  # three runs cannot meet every kind of fault


def test_one_seed_is_one_run(said):
    code, out, _ = said("--seeds", "3", "--policy", "reports")
    assert out.startswith("1 runs, ")
    assert code == 0


def test_an_unknown_policy_is_refused_with_the_nearest_one(said):
    code, out, err = said("--policy", "report")
    assert (code, out) == (2, "")
    assert "unknown policy 'report'; did you mean 'reports'?" in err


def test_help_is_a_page(said):
    code, out, _ = said("--help")
    assert code == 0
    assert len(out.splitlines()) < 25
    assert "0:3000" in out
