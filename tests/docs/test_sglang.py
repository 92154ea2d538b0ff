"""The commands of docs/sglang.md run, and print what stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from l3store.cli import main

DOC = Path(__file__).parents[2] / "docs" / "sglang.md"
TEXT = DOC.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    l3store (sglang-config .*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs(command):
    done = CliRunner().invoke(main, shlex.split(command))
    assert done.exit_code == 0, done.output


def test_the_first_launch_line_is_what_is_printed():
    first = next(command for command in COMMANDS if "--help" not in command)
    printed = CliRunner().invoke(main, shlex.split(first)).stdout
    (shown,) = re.findall(r"```\n(sglang serve.*?)```", TEXT, re.DOTALL)
    assert shown == printed


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (DOC.parent / target).exists(), target
