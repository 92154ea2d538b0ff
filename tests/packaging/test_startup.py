"""What starts must start fast: no heavy library comes with the import or with help."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "rich", "aiofiles", "pytest", "hypothesis", "prometheus_client")


@pytest.mark.parametrize(
    "code",
    [
        "import l3store",
        "from l3store import abc, keys, page, registry; registry.schemes()",
        "from l3store.cli import main; main(['--help'], standalone_mode=False)",
    ],
)
def test_nothing_heavy_is_loaded(code):
    code += f"\nimport sys; print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
