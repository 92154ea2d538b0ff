"""The example of docs/consensus.md runs as it stands, and is as short as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "consensus.md"
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_runs_and_both_ranks_settle_what_both_have():
    ended = subprocess.run(
        [sys.executable, "-c", EXAMPLE], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stderr == ""
    assert ended.stdout == "([5], [5])\n"


def test_the_example_is_sixty_lines_of_code():
    code = [line for line in EXAMPLE.splitlines() if line.strip()]
    assert len(code) <= 60


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target
