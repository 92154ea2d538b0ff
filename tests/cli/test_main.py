"""The command line as a whole."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from l3store import __version__
from l3store.cli import _COMMANDS, main


def _run(*arguments):
    return CliRunner().invoke(main, arguments)


def test_help_lists_every_command():
    done = _run("--help")
    assert done.exit_code == 0
    assert all(f"\n  {name}" in done.output for name in _COMMANDS)


@pytest.mark.parametrize("name", sorted(_COMMANDS))
def test_every_command_has_help(name):
    done = _run(name, "--help")
    assert done.exit_code == 0
    assert "Usage: main" in done.output


def test_the_version_is_the_packages():
    assert __version__ in _run("--version").output


def test_an_unknown_command_names_the_nearest():
    done = _run("reply")
    assert done.exit_code == 2
    assert "did you mean 'replay'" in done.output


def test_debug_shows_the_error_itself():
    done = _run("--debug", "replay", "--synthetic", "1", "--url", "memry://")
    assert done.exit_code == 1
    assert "memry" in str(done.exception)
