"""Opens a store for looking: nothing is created and nothing is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from l3store import registry
from l3store.config import STACK_OPTIONS, StackOptions, StoreURL, load_options
from l3store.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Collection

    from l3store.abc import Backend

__all__ = ["choose", "open_to_look"]


def open_to_look(url: str) -> Backend:
    """Opens the store at `url` without its wrappers and without the right to write.

    Bare, because a wrapper would bound a walk by the deadline of a call, and would remove the
    damaged pages that a tool wants to show. Blocks until the store has answered.

    Raises:
        ConfigError: Scheme, option or place is wrong, the store is not there, it cannot list its
            pages, or it is one that begins empty in every process.
        BackendUnavailable: The store does not answer.
    """
    parsed = StoreURL.parse(url)
    given = {name: value for name, value in parsed.options.items() if name in STACK_OPTIONS}
    load_options(StackOptions, "stack", given)  # without effect here, but a mistake is a mistake
    kind = registry.backend_class(parsed.scheme)
    options = {**parsed.options, **kind.read_only_options}
    backend = kind.from_url(replace(parsed, options=options).without(STACK_OPTIONS))
    can = backend.capabilities
    problem = ""
    if not (can.durable or can.shared):
        problem = (
            "lives in the memory of one process and begins empty in each, so there is nothing to "
            "look at; name a store that outlives its writer, such as file:///mnt/l3"
        )
    elif not can.listing:
        problem = "cannot list its pages (it lacks the capability 'listing')"
    if problem:
        backend.close()
        raise ConfigError(f"{parsed} {problem}")
    return backend


def choose(what: str, name: str, known: Collection[str]) -> str:
    """Returns `name` when it is known.

    Raises:
        ConfigError: It is not; the message names the nearest one.
    """
    if name not in known:
        raise ConfigError(f"no {what} {name!r} in this store{nearest(name, known)}")
    return name
