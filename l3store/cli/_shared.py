"""What the commands share: option types, JSON, tables and progress bars."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

from l3store.config import StoreURL, parse_size
from l3store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "SIZE",
    "as_json",
    "commas",
    "human_bytes",
    "json_option",
    "progress",
    "shown_url",
    "table",
]


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            size = parse_size(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        if size <= 0:
            self.fail(f"{value!r} is not positive", param, ctx)
        return size


SIZE = _Size()
"""A number of bytes, such as 64KiB."""

json_option = click.option("--json", "json_", is_flag=True, help="Print one JSON object instead.")


def commas(
    kind: click.ParamType[Any], choices: Sequence[str] = ()
) -> Callable[..., tuple[Any, ...]]:
    """Returns a callback for an option that takes several values, parted by commas."""
    one = click.Choice(list(choices)) if choices else kind

    def convert(ctx: click.Context, param: click.Parameter, value: str) -> tuple[Any, ...]:
        return tuple(one.convert(part.strip(), param, ctx) for part in value.split(","))

    return convert


def as_json(value: Any) -> None:
    """Prints one JSON object on standard output."""
    click.echo(msgspec.json.encode(value))


def shown_url(url: str) -> str:
    """Returns a store's URL as it may be printed: passwords and keys stand in the part left out."""
    return str(StoreURL.parse(url))


def human_bytes(count: float) -> str:
    """Returns a size for people: ``1.41 GB`` (decimal, as throughput is)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """Prints a table; never cut, also where the output is a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table()
    for i, name in enumerate(columns):
        numbers = all(_is_number(row[i]) for row in rows)
        shown.add_column(
            name, justify="right" if numbers and rows else "left", overflow="fold",
            no_wrap=i == 0 and not sys.stdout.isatty(),
        )  # fmt: skip
    for row in rows:
        # Text, not str: what stands in a store is data, never markup.
        shown.add_row(*(Text(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else 200
    console = Console(file=sys.stdout, width=width, highlight=False)
    if title:
        console.print(Text(title), soft_wrap=True)
    console.print(shown)


def _is_number(cell: object) -> bool:
    return str(cell)[:1].isdigit() or str(cell) in ("", "-")


@contextmanager
def progress(what: str, total: int | None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on standard error where that is a terminal; gives ``advance(n)``."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)
