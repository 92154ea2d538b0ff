"""torch, without what it says about a numpy that nobody here needs."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

__all__ = ["torch"]
