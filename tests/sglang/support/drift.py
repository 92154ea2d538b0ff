"""What of sglang the adapter leans on, told as facts, and the one comparison of a fact with sglang.

A fact is about one thing of sglang: a class, a function, a pool, or sglang's sources. Its reader
turns the thing into names and texts, and `moved` says how they differ from what they were.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sglang

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "WRITTEN_FOR",
    "Fact",
    "assigned",
    "attributes",
    "fields",
    "function",
    "members",
    "methods",
    "moved",
    "sources",
    "takes",
    "trees",
    "value",
]

WRITTEN_FOR = "0.5.23"
Names = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Something of sglang that the adapter leans on."""

    of: str
    """The thing, as ``module:name``; with `load` only what it is called."""
    look: Callable[[Any], Names]
    """Reads names and texts of the thing."""
    said: Mapping[str, str]
    """What `look` found in the version that the adapter is written for."""
    uses: str
    """File of the adapter and what it does, such as ``adapters/sglang/engine.py reads``."""
    then: str
    """What to change when a name is gone, or is another."""
    new: str = ""
    """What to think of when there is a new name; "" where new ones do not matter."""
    load: Callable[[], Any] | None = None
    label: str = ""
    """What the thing is called in messages, if not by its name."""

    def thing(self) -> Any:
        """Returns the thing itself, of the installed sglang."""
        if self.load is not None:
            return self.load()
        module, _, name = self.of.partition(":")
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found


def moved(fact: Fact, thing: Any = None, version: str = sglang.__version__) -> list[str]:
    """Returns a line for each thing that is not as the fact says, and what to do about it.

    Args:
        fact: What was.
        thing: Looked at in place of what is installed.
        version: How messages call what is looked at.
    """
    label = fact.label or fact.of.partition(":")[2] or fact.of
    try:
        found = fact.look(fact.thing() if thing is None else thing)
    except Exception as error:  # it is gone, or cannot be made as it was
        said = f"{type(error).__name__}: {error}"
        return [f"{fact.uses} {label}, which sglang {version} has not so: {said}. {fact.then}"]
    lines = []
    for name, text in fact.said.items():
        if name not in found:
            lines.append(
                f"{fact.uses} {label}.{name}, which sglang {version} does not have. {fact.then}"
            )
        elif found[name] != text:
            lines.append(
                f"{fact.uses} {label}.{name}: {text} in sglang {WRITTEN_FOR}, "
                f"{found[name]} in sglang {version}. {fact.then}"
            )
    if fact.new:
        lines += [
            f"sglang {version} has a new {label}.{name}: {found[name]}. {fact.new}"
            for name in found.keys() - fact.said.keys()
        ]
    return lines


# -- readers of objects ----------------------------------------------------------------------------


def methods(cls: Any) -> Names:
    """The public methods of a class, abstract or not, with their parameters."""
    abstract = getattr(cls, "__abstractmethods__", ())
    return {
        name: ("abstract " if name in abstract else "") + _parameters(found)
        for name, found in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def function(found: Any) -> Names:
    """The parameters of one function or method."""
    return {"parameters": _parameters(found)}


def takes(count: int) -> Callable[[Any], Names]:
    """Returns a reader of whether something can be called with so many arguments."""

    def look(found: Any) -> Names:
        try:
            inspect.signature(found).bind(*range(count))
        except TypeError as error:
            return {"call": str(error)}
        return {"call": f"takes {count}"}

    return look


def value(found: Any) -> Names:
    """A constant."""
    return {"value": repr(found)}


def members(enum: type[Enum]) -> Names:
    """The members of an enumeration."""
    return {member.name: repr(member.value) for member in enum}


def fields(cls: Any) -> Names:
    """The fields of a dataclass, with their defaults."""
    told = {}
    for field in dataclasses.fields(cls):
        given = field.default is not dataclasses.MISSING
        made = field.default_factory is not dataclasses.MISSING
        default = field.default.value if isinstance(field.default, Enum) else field.default
        told[field.name] = repr(default) if given else "made" if made else "required"
    return told


def attributes(*names: str) -> Callable[[Any], Names]:
    """Returns a reader of the attributes of an object: methods with their parameters."""

    def look(found: Any) -> Names:
        there = {name: getattr(found, name) for name in names if hasattr(found, name)}
        return {n: _parameters(a) if inspect.ismethod(a) else "there" for n, a in there.items()}

    return look


def assigned(*names: str) -> Callable[[Any], Names]:
    """Returns a reader of the attributes that a class's own methods set on `self`."""

    def look(cls: Any) -> Names:
        tree = ast.parse(inspect.getsource(cls))
        set_there = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        return {name: "there" for name in names if name in set_there}

    return look


def _parameters(found: Any) -> str:
    told = []
    for one in inspect.signature(found).parameters.values():
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "" if one.default is one.empty else f"={one.default!r}"
        told.append(star + one.name + default)
    return f"({', '.join(told)})"


# -- readers of sources ----------------------------------------------------------------------------


@functools.cache
def sources(*files: str, holding: str = "") -> dict[str, str]:
    """Returns sglang's sources by their path: these (or in these folders), that hold a text."""
    root = Path(sglang.__file__).parent / "srt"
    paths = [root / file for file in files or (".",)]
    paths = [one for path in paths for one in (path.rglob("*.py") if path.is_dir() else [path])]
    found = {path.relative_to(root).as_posix(): path.read_text() for path in sorted(paths)}
    return {path: text for path, text in found.items() if holding in text}


def trees(texts: Mapping[str, str]) -> Iterator[ast.AST]:
    """Yields all nodes of the sources."""
    for text in texts.values():
        yield from ast.walk(ast.parse(text))
