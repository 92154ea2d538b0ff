"""What a store holds: namespaces with their descriptors, places, pages."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from l3store import page
from l3store.abc import Capabilities
from l3store.errors import ConfigError, IntegrityError, L3Error
from l3store.keys import FIRST_PAGE, Descriptor, PlaceDescriptor, decode_meta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from l3store.abc import Backend

__all__ = [
    "NamespaceView",
    "PageView",
    "PlaceView",
    "StoreView",
    "list_namespaces",
    "list_pages",
    "view_store",
]

_PAGES_A_CALL = 1024


class PlaceView(msgspec.Struct, frozen=True, kw_only=True):
    """One place: where pages of one size live."""

    place: str
    pages: int
    payload_bytes: int
    stored_bytes: int
    descriptor: PlaceDescriptor | None
    problem: str
    """Why there is no descriptor; empty where there is one."""


class NamespaceView(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace, with the sums over its places."""

    namespace: str
    pages: int
    payload_bytes: int
    stored_bytes: int
    descriptor: Descriptor | None
    problem: str
    """Why there is no descriptor; empty where there is one."""
    places: list[PlaceView]


class PageView(msgspec.Struct, frozen=True, kw_only=True):
    """One page, as its header says; the payload was not read."""

    key: str
    problem: str = ""
    """One of `l3store.page.REASONS`, "gone", or empty: the header is whole and of this key."""
    payload_bytes: int | None = None
    depth: int | None = None
    """None: unknown."""
    parent: str | None = None
    """Hexadecimal; "" for a first page; None: unknown."""
    created_ns: int | None = None


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """What a store is, how it is and how much it holds."""

    url: str
    capabilities: Capabilities
    health: str
    """"ok", or why not."""
    namespaces: int
    pages: int
    payload_bytes: int
    stored_bytes: int
    places: list[PlaceView]
    details: dict[str, str | int | float]
    """What the backend itself tells."""


def list_namespaces(backend: Backend) -> list[NamespaceView]:
    """Returns every namespace that has a descriptor or a page, sorted by name.

    A missing or unreadable descriptor is told, not raised. Blocks for one walk over the store.

    Raises:
        BackendUnavailable: The store does not answer.
    """
    usages = {usage.place: usage for usage in backend.usage()}
    named = backend.list_meta()
    places: dict[str, list[PlaceView]] = {name: [] for name in named if "/" not in name}
    for place in sorted({*usages, *(name for name in named if "/" in name)}):
        usage = usages.get(place)
        descriptor, problem = _descriptor(backend, place)
        view = PlaceView(
            place=place,
            pages=usage.pages if usage else 0,
            payload_bytes=usage.payload_bytes if usage else 0,
            stored_bytes=usage.stored_bytes if usage else 0,
            descriptor=descriptor if isinstance(descriptor, PlaceDescriptor) else None,
            problem=problem,
        )
        places.setdefault(place.partition("/")[0], []).append(view)
    found = []
    for namespace, views in sorted(places.items()):
        descriptor, problem = _descriptor(backend, namespace)
        found.append(
            NamespaceView(
                namespace=namespace,
                pages=sum(view.pages for view in views),
                payload_bytes=sum(view.payload_bytes for view in views),
                stored_bytes=sum(view.stored_bytes for view in views),
                descriptor=descriptor if isinstance(descriptor, Descriptor) else None,
                problem=problem,
                places=views,
            )
        )
    return found


def _descriptor(backend: Backend, name: str) -> tuple[Descriptor | PlaceDescriptor | None, str]:
    try:
        data = backend.get_meta(name)
        if data is None:
            return None, "no descriptor"
        return decode_meta(name, data), ""
    except ConfigError as error:
        return None, str(error)
    except L3Error as error:  # such as a folder in its place; the pages are still worth showing
        return None, f"descriptor of {name!r} cannot be read: {error}"


def list_pages(backend: Backend, places: Iterable[str]) -> Iterator[PageView]:
    """Yields the pages of `places`; reads headers only. Blocks for a trip each 1024 pages.

    Raises:
        NotImplementedError: The backend lacks the capability `headers`.
        BackendUnavailable: The store does not answer.
    """
    step = min(_PAGES_A_CALL, backend.capabilities.max_batch)
    for place in places:
        keys = backend.scan(place)
        while part := list(islice(keys, step)):
            for key, data in zip(part, backend.headers(part), strict=True):
                yield _view(key, data)


def _view(key: str, data: bytes | None) -> PageView:
    if data is None:
        return PageView(key=key, problem="gone")
    try:
        header = page.parse(data)
        page.parse_of(key, data, header.payload_bytes)
    except IntegrityError as error:
        return PageView(key=key, problem=error.reason)
    parent = header.parent
    return PageView(
        key=key,
        payload_bytes=header.payload_bytes,
        depth=header.depth,
        parent=None if parent is None else "" if parent == FIRST_PAGE else parent.hex(),
        created_ns=header.created_ns,
    )


def view_store(backend: Backend, url: str) -> StoreView:
    """Returns what a store is, how it is and how much it holds. Blocks for one walk over it.

    Raises:
        BackendUnavailable: The store cannot be listed. That it is not well is told, not raised.
    """
    try:
        backend.health()
        health = "ok"
    except L3Error as error:
        health = str(error)
    namespaces = list_namespaces(backend)
    return StoreView(
        url=url,
        capabilities=backend.capabilities,
        health=health,
        namespaces=len(namespaces),
        pages=sum(one.pages for one in namespaces),
        payload_bytes=sum(one.payload_bytes for one in namespaces),
        stored_bytes=sum(one.stored_bytes for one in namespaces),
        places=[place for one in namespaces for place in one.places],
        details=backend.details(),
    )
