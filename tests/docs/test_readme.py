"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    code = code.replace("/tmp/l3", str(tmp_path / "l3"))
    found = {}
    exec(compile(code, "README.md", "exec"), found)
    assert found["hit"] == 4
    assert found["done"] == [True] * 4


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
