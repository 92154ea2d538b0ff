"""Lets sglang be imported on a machine without a GPU: what it imports and cannot run is a shell.

Only packages that are not installed, and that nothing on the way of the file backend calls.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["install"]

_ABSENT = (
    "IPython", "aiohttp", "compressed_tensors", "gguf", "partial_json_parser", "sentencepiece",
    "starlette", "torchvision", "triton", "tvm_ffi",
)  # fmt: skip


class _ShellClass(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"<absent {cls.__name__}.{name}>"


class _Shell(types.ModuleType):
    """A module whose every name is there: classes for capital letters, else pass-through calls."""

    __path__: list[str] = []  # noqa: RUF012 - how a package looks
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any
        if name[:1].isupper():
            made = _ShellClass(name, (), {"__init__": lambda self, *_, **__: None})
        else:
            made = _Shell(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and callable(given[0]) and not named:
            return given[0]  # a decorator
        return lambda function=None, *_, **__: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: set[str]) -> None:
        self._roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = name.partition(".")[0]
        return ModuleSpec(name, self, is_package=True) if root in self._roots else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Shell(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """A shell is ready when it is made."""


def install() -> None:
    """To be called before sglang is imported."""
    from transformers.utils import import_utils

    # transformers remembers what is absent: ask before it looks there.
    for what in ("torchvision", "torchvision_v2", "torchaudio"):
        getattr(import_utils, f"is_{what}_available", lambda: False)()
    sys.meta_path.insert(
        0, _Finder({name for name in _ABSENT if importlib.util.find_spec(name) is None})
    )
