"""Each error is a builtin that callers already handle, and says what was done nevertheless."""

from __future__ import annotations

import pytest

from l3store import errors

BUILTINS = {
    errors.ConfigError: ValueError,
    errors.BackendUnavailable: ConnectionError,
    errors.BackendTimeout: TimeoutError,
    errors.CapacityError: OSError,
    errors.IntegrityError: ValueError,
    errors.ConsensusError: RuntimeError,
}


@pytest.mark.parametrize(("kind", "builtin"), BUILTINS.items())
def test_every_error_is_also_a_builtin(kind, builtin):
    error = kind("what happened")
    assert isinstance(error, builtin)
    assert isinstance(error, errors.L3Error)
    assert str(error) == "what happened"
    assert error.done == []


def test_no_error_class_is_left_out():
    declared = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    assert {k for k in declared if issubclass(k, errors.L3Error)} == {*BUILTINS, errors.L3Error}


def test_done_is_a_copy():
    done = [True, False]
    error = errors.BackendUnavailable("gone", done=done)
    done[1] = True
    assert error.done == [True, False]


def test_nearest_ignores_case_and_lists_all():
    assert errors.nearest("GIB", ["MiB", "GiB"]) == "; did you mean 'GiB'? Known: GiB, MiB"
    assert errors.nearest("replay-3", ["replay-30561414121e50ec6b7f"]).startswith("; did you mean")
    assert errors.nearest("zzz", ["a"]) == ". Known: a"
    assert errors.nearest("", ["a"]) == ". Known: a"
