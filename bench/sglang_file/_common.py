"""Puts bench/common on the path: to be imported before what lies there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "common"))
