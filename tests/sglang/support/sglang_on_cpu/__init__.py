"""Lets sglang be imported where its GPU packages are not installed: absent ones are stubs.

`watch` runs at the start of every interpreter of the venv, engine processes included, and costs
nothing until sglang is imported. Only what is not installed becomes a stub; every line of sglang's
own runs. What needs a GPU and is called (copies between the device and the host pool) is in
`kvcacheio`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["STUBS", "watch"]

STUBS = frozenset(
    {
        "IPython", "aiohttp", "compressed_tensors", "cutlass", "gguf", "partial_json_parser",
        "quack", "sentencepiece", "sgl_kernel", "torchaudio", "torchvision", "triton",
        "llguidance", "watchfiles",
    }
)  # fmt: skip
"""Packages that sglang imports and a run on CPU does not need."""


class _NamedThing(type):
    """A class whose every attribute is a text: for enumerations and constants."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return f"<stub {cls.__name__}.{name}>"


class _StubModule(types.ModuleType):
    """A module that has every attribute: a class if its name is capitalized, else a decorator."""

    __path__: ClassVar[list[str]] = []
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value: Any
        if name[:1].isupper():
            body = {"__module__": self.__name__, "__init__": lambda self, *args, **kw: None}
            value = _NamedThing(name, (), body)
        else:
            value = _StubCallable(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _StubCallable(_StubModule):
    """Decorates by doing nothing, with or without arguments."""

    def __call__(self, *args: Any, **kw: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kw:
            return args[0]
        return lambda function=None, *rest, **more: function


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stubs that are not installed, from the first import of sglang on."""

    def __init__(self) -> None:
        self._roots: frozenset[str] | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = name.partition(".")[0]
        if self._roots is None:
            if root != "sglang":
                return None
            self._start()
        if root not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def _start(self) -> None:
        # What sglang compiles (its page hash) belongs to this venv, not to the user's home.
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
        self._roots = frozenset()  # what is imported here is looked for where it is installed
        absent = frozenset(name for name in STUBS if importlib.util.find_spec(name) is None)
        if "torchvision" in absent:
            # transformers keeps what it found: it is to know of these that they are absent.
            from transformers.utils import import_utils

            import_utils.is_torchvision_available()
            import_utils.is_torchvision_v2_available()
            import_utils.is_torchaudio_available()
        self._roots = absent

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: a stub has no code."""


def watch() -> None:
    """Waits for the first import of sglang."""
    sys.meta_path.insert(0, _Stubs())
