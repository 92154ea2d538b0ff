"""sglang's own Llama, under a name that `SGLANG_EXTERNAL_MODEL_PACKAGE` finds."""

from __future__ import annotations

from sglang.srt.models.llama import EntryClass

__all__ = ["EntryClass"]
