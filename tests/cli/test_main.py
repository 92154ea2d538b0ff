"""The command line as a whole."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from l3store import __version__, registry
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


def test_an_error_is_one_line_and_debug_shows_where_it_arose():
    call = ("replay", "--synthetic", "1", "--url", "memry://")
    plain, debug = _run(*call), _run("--debug", *call)
    assert plain.exit_code == debug.exit_code == 2
    assert plain.stderr.count("\n") == 1
    assert plain.stderr.startswith("error: ")
    assert "Traceback" in debug.stderr
    assert "memry" in debug.stderr


def test_an_interrupt_is_not_told_as_something_wrong_in_the_store(monkeypatch):
    def interrupted(url):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "open", interrupted)
    assert _run("replay", "--synthetic", "1", "--url", "memory://").exit_code == 130
