"""Where the real trace is, and what its absence means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_trace() -> Path:
    """The conversation trace: beside the checkout, or where L3STORE_TRACE_DIR says."""
    default = Path(__file__).parents[1].parent / "shared" / "traces"
    path = Path(os.environ.get("L3STORE_TRACE_DIR", default)) / "mooncake_conversation.jsonl"
    if not path.exists():
        missing = f"{path} is not there; set L3STORE_TRACE_DIR"
        if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return path
