"""``l3store stat``: what a store is, how it is and how much it holds."""

from __future__ import annotations

from dataclasses import fields

import click

from l3store.cli._shared import as_json, human_bytes, json_option, shown_url, table

__all__ = ["command"]


@click.command("stat")
@click.argument("url")
@json_option
def command(url: str, json_: bool) -> None:
    """Say what the store at URL can do, whether it is well, and how much it holds.

    The store is opened without the right to write: "health ok" means that it can be read. Exit
    code 2: it is not well.
    """
    from l3store.inspect import open_to_look, view_store

    with open_to_look(url) as backend:
        seen = view_store(backend, shown_url(url))
    if json_:
        as_json(seen)
    else:
        able = {field.name: getattr(seen.capabilities, field.name)
                for field in fields(seen.capabilities)}  # fmt: skip
        rows: list[tuple[str, object]] = [
            ("health", seen.health),
            ("namespaces", seen.namespaces),
            ("places", len(seen.places)),
            ("pages", seen.pages),
            ("payload", human_bytes(seen.payload_bytes)),
            ("stored", human_bytes(seen.stored_bytes)),
            *((name, _shown(name, value)) for name, value in seen.details.items()),
            (
                "can, opened like this",
                ", ".join(name for name, value in able.items() if value is True) or "-",
            ),
            (
                "cannot, opened like this",
                ", ".join(name for name, value in able.items() if value is False) or "-",
            ),
        ]
        table(("", seen.url), rows)
        table(
            ("place", "pages", "payload", "stored"),
            [
                (
                    one.place,
                    one.pages,
                    human_bytes(one.payload_bytes),
                    human_bytes(one.stored_bytes),
                )
                for one in seen.places
            ],
        )
    if seen.health != "ok":
        raise SystemExit(2)


def _shown(name: str, value: str | float) -> str:
    if name.endswith("bytes") and not isinstance(value, str):
        return human_bytes(value)
    return str(value)
