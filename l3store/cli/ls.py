"""``l3store ls``: namespaces with their descriptors, places, counts, sizes; pages on request."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
import msgspec

from l3store.cli._shared import as_json, human_bytes, json_option, shown_url, table

if TYPE_CHECKING:
    from l3store.inspect import NamespaceView, PageView

__all__ = ["command"]


@click.command("ls")
@click.argument("url")
@click.argument("namespace", required=False)
@click.option("--pages", is_flag=True, help="List every page, too: its header, not its payload.")
@json_option
def command(url: str, namespace: str | None, pages: bool, json_: bool) -> None:
    """List the namespaces of the store at URL with their descriptors, or the places of one.

    The store is opened without the right to write; nothing is created or changed. A namespace
    without a descriptor, or with one that cannot be read, is shown as such.
    """
    from l3store.inspect import choose, list_namespaces, list_pages, open_to_look

    with open_to_look(url) as backend:
        found = list_namespaces(backend)
        if namespace is not None:
            choose("namespace", namespace, [one.namespace for one in found])
            found = [one for one in found if one.namespace == namespace]
        places = [place.place for one in found for place in one.places]
        listed = list_pages(backend, places) if pages else iter(())
        if json_:
            tree: dict[str, object] = {"url": shown_url(url), "namespaces": found}
            as_json(tree | {"pages": list(listed)} if pages else tree)
            return
        if namespace is None:
            _print_namespaces(found, shown_url(url))
        else:
            _print_namespace(found[0])
        for one in listed:
            click.echo(_line(one))


def _print_namespaces(found: list[NamespaceView], url: str) -> None:
    rows = []
    for one in found:
        told = one.descriptor
        what = (
            (told.model, told.dtype, told.page_size, told.pool, told.page_bytes)
            if told
            else (one.problem, "", "", "", "")
        )
        rows.append((
            one.namespace, *map(_plain, what), len(one.places), one.pages,
            human_bytes(one.payload_bytes), human_bytes(one.stored_bytes),
        ))  # fmt: skip
    columns = ("namespace", "model", "dtype", "tokens", "pool", "page bytes", "places", "pages",
               "payload", "stored")  # fmt: skip
    table(columns, rows, title=f"{url}: {len(found)} namespaces")


def _print_namespace(one: NamespaceView) -> None:
    fields = msgspec.structs.asdict(one.descriptor) if one.descriptor else {}
    table(
        ("field", "value"),
        [(name, "-" if value is None else _plain(value)) for name, value in fields.items()]
        or [("descriptor", _plain(one.problem))],
        title=one.namespace,
    )
    rows = []
    for place in one.places:
        told = place.descriptor
        rows.append((
            place.place.partition("/")[2],
            f"{told.layer_start}-{told.layer_end}" if told else "-",
            f"{told.head_start}-{told.head_end}" if told else "-",
            len(told.segments) if told else "-",
            place.pages, human_bytes(place.payload_bytes), human_bytes(place.stored_bytes),
            "" if told else _plain(place.problem),
        ))  # fmt: skip
    columns = ("pool/shard", "layers", "heads", "segments", "pages", "payload", "stored",
               "descriptor")  # fmt: skip
    table(columns, rows, title=f"{len(rows)} places, {one.pages} pages")


def _line(one: PageView) -> str:
    if one.problem:
        return f"{one.key}  {one.problem}"
    created = datetime.fromtimestamp((one.created_ns or 0) // 10**9, UTC)
    parent = "unknown" if one.parent is None else one.parent[:16] or "first"
    depth = "unknown" if one.depth is None else one.depth
    return (
        f"{one.key}  {one.payload_bytes} B  depth {depth}  parent {parent}  "
        f"{created:%Y-%m-%dT%H:%M:%SZ}"
    )


def _plain(value: object) -> str:
    """What stands in a store is shown, never obeyed by the terminal."""
    text = str(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode()
