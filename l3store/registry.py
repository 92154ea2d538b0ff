"""Finds backends by entry point and opens stores by URL.

A backend is a class that an installed distribution declares in the entry-point group
``l3store.backends`` under its URL scheme; L3Store's own are found the same way.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from l3store.abc import Backend
from l3store.config import STACK_OPTIONS, StackOptions, StoreURL, load_options
from l3store.errors import ConfigError, nearest
from l3store.metrics import METRICS

if TYPE_CHECKING:
    from l3store.metrics import Metrics

__all__ = ["GROUP", "backend_class", "open", "schemes", "stack"]

GROUP = "l3store.backends"


def _found() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def schemes() -> list[str]:
    """Returns the schemes of all installed backends, sorted. Imports none of them."""
    return sorted(_found())


def backend_class(scheme: str) -> type[Backend]:
    """Returns the backend class of a scheme.

    Raises:
        ConfigError: No installed distribution declares the scheme, what it declares cannot be
            imported (often a missing extra), or it is no `Backend`.
    """
    point = _found().get(scheme)
    if point is None:
        raise ConfigError(f"unknown backend {scheme!r}{nearest(scheme, schemes())}")
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"backend {scheme!r} ({point.value}) cannot be loaded: {error}"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
        raise ConfigError(f"backend {scheme!r} ({point.value}) is not a subclass of Backend")
    return loaded


def open(url: str, *, raw: bool = False, metrics: Metrics = METRICS) -> Backend:
    """Opens the store at `url`, ready to use: metered(breaker(deadline(verify(backend)))).

    Blocks until the store has answered. Call it from any thread.

    Args:
        url: Such as ``file:///mnt/l3?workers=8&deadline=2s``.
        raw: The bare backend, for tools and benchmarks; pages are not verified.
        metrics: Where calls are counted.

    Raises:
        ConfigError: Scheme, option or place is wrong; the message names the nearest valid one.
        BackendUnavailable: The store does not answer.
    """
    parsed = StoreURL.parse(url)
    kind = backend_class(parsed.scheme)
    given = {name: value for name, value in parsed.options.items() if name in STACK_OPTIONS}
    options = load_options(StackOptions, "stack", given)
    backend = kind.from_url(parsed.without(STACK_OPTIONS))
    return backend if raw else stack(backend, options, name=parsed.scheme, metrics=metrics)


def stack(
    backend: Backend,
    options: StackOptions | None = None,
    *,
    name: str,
    metrics: Metrics = METRICS,
) -> Backend:
    """Returns `backend` inside its wrappers, for embedders that build backends themselves.

    Args:
        backend: A bare backend; the stack's `close` closes it.
        options: Deadline and breaker; None for the defaults.
        name: The value of the label ``backend`` in metrics.
        metrics: Where calls are counted.
    """
    # Imported here: `schemes()` must stay cheap for the command line's help.
    from l3store.wrap import Breaker, Deadline, Metered, Verify

    options = options or StackOptions()
    late = None if options.late == "default" else options.late
    verified = Verify(backend, name=name, metrics=metrics)
    bounded = Deadline(verified, options.deadline, late, name=name, metrics=metrics)
    breaker = Breaker(
        bounded,
        failures=options.breaker_failures,
        cooldown=options.breaker_cooldown,
        max_cooldown=options.breaker_max_cooldown,
        late_calls=bounded.late_calls,
        name=name,
        metrics=metrics,
    )
    return Metered(breaker, name=name, metrics=metrics)
