"""``l3store verify``: every page checked, bad ones named and, on request, removed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from l3store import registry
from l3store.cli._shared import as_json, human_bytes, json_option, progress, shown_url, table

if TYPE_CHECKING:
    from l3store.inspect import CheckResult

__all__ = ["command"]

_SHOWN = 100


@click.command("verify")
@click.argument("url")
@click.argument("namespace", required=False)
@click.option("--place", help="Check only this place: <namespace>/<pool>/<shard>.")
@click.option("--delete", is_flag=True, help="Remove the pages that were seen bad, and no others.")
@json_option
def command(url: str, namespace: str | None, place: str | None, delete: bool, json_: bool) -> None:
    """Check every page of the store at URL, header and payload; of one NAMESPACE if it is named.

    Without --delete the store is opened without the right to write. "Behind a hole" are good pages
    whose chain is broken before them, so that no prompt can reach them; in a fast tier that may be
    right, as a slower one can hold the missing pages. Exit code 1: a page is bad.
    """
    from l3store.inspect import check_store, choose, open_to_look

    with ExitStack() as opened:
        backend = opened.enter_context(open_to_look(url))
        places = backend.usage()
        if namespace is not None:
            choose("namespace", namespace, {one.place.partition("/")[0] for one in places})
            places = [one for one in places if one.place.startswith(f"{namespace}/")]
        if place is not None:
            choose("place", place, [one.place for one in places])
            places = [one for one in places if one.place == place]
        writable = None
        if delete:  # only now: a store that is not there must not be made
            writable = opened.enter_context(registry.open(url, raw=True))
        total = sum(one.pages for one in places)
        with progress("verify", total, quiet=json_) as advance:
            result = check_store(backend, places, remove_from=writable, advance=advance)
    result.url = shown_url(url)
    if json_:
        as_json(result)
    else:
        _print(result, delete)
    if result.bad_pages:
        raise SystemExit(1)


def _print(result: CheckResult, delete: bool) -> None:
    from l3store.inspect.checking import REASONS

    rate = f", {result.payload_bytes / result.seconds / 1e9:.2f} GB/s" if result.seconds else ""
    rows: list[tuple[str, object]] = [
        ("pages checked", result.pages),
        ("bad pages", result.bad_pages),
        *((f"  {reason}: {REASONS[reason]}", count) for reason, count in result.reasons.items()),
        ("pages behind a hole", result.behind_a_hole),
        ("pages gone meanwhile", result.gone_pages),
        *([("pages removed", result.deleted_pages)] if delete else []),
        ("good payload", f"{human_bytes(result.payload_bytes)}{rate}"),
    ]
    table(("", "result"), rows, title=result.url)
    table(
        ("place", "pages", "bad", "behind a hole"),
        [
            (one.place, one.pages, one.bad_pages,
             "-" if one.behind_a_hole is None else one.behind_a_hole)
            for one in result.places
        ],
    )  # fmt: skip
    for bad in result.bad[:_SHOWN]:
        click.echo(f"bad: {bad.key}: {bad.reason}")
    if len(result.bad) > _SHOWN:
        click.echo(f"... and {len(result.bad) - _SHOWN} more; --json names them all")
    for line in result.not_removed:
        click.echo(f"not removed: {line}", err=True)
