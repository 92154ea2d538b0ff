"""Examples of hypothesis have no deadline: how long one takes is the machine's business."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("consensus", deadline=None)
settings.load_profile("consensus")
