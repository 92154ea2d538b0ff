"""``l3store replay``: a trace over a store, with its result table."""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from l3store import registry
from l3store.cli._shared import (
    SIZE,
    as_json,
    human_bytes,
    json_option,
    progress,
    shown_url,
    table,
)
from l3store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from l3store.replay import BadLine, ReplayResult, Request

__all__ = ["command"]

_SHOWN_BAD = 3


@click.command("replay")
@click.argument("trace", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--synthetic", "seed_of_trace", type=click.IntRange(min=0),
              help="Make a trace from this seed.")  # fmt: skip
@click.option("--url", required=True, help="The store.")
@click.option("--requests", type=click.IntRange(min=1), help="Stop after so many.  [default: all]")
@click.option("--page-bytes", type=SIZE, default="64KiB", show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=128, show_default=True,
              help="Pages a call.")  # fmt: skip
@click.option("--seed", type=click.IntRange(-(2**63), 2**63 - 1), default=0, show_default=True,
              help="Another one: other pages.")  # fmt: skip
@click.option("--skip-bad", is_flag=True, help="Count bad lines of the trace and go on.")
@json_option
def command(
    trace: str | None,
    seed_of_trace: int | None,
    url: str,
    requests: int | None,
    page_bytes: int,
    batch: int,
    seed: int,
    skip_bad: bool,
    json_: bool,
) -> None:
    """Replay TRACE over a store and check every byte that comes back.

    For each request: batch_exists over its chain, page_get of the hit prefix, page_set of the rest.
    Timed are the calls of the store, and the checksums of pages written; making and comparing
    bytes is not. "Pages promised, not served" were there for batch_exists and not for page_get
    (evicted meanwhile, or damaged and refused); they are stored again. Exit code 1: a page
    was read as good and was wrong.
    """
    from l3store.replay import replay

    if (trace is None) == (seed_of_trace is None):
        raise click.UsageError("name a TRACE, or --synthetic SEED to make one")
    bad_lines, first_bad = 0, list[str]()

    def leave_out(bad: BadLine) -> None:
        nonlocal bad_lines
        bad_lines += 1
        if bad_lines <= _SHOWN_BAD:
            first_bad.append(str(bad))

    found = _requests(trace, seed_of_trace, requests, leave_out if skip_bad else None)
    chosen = islice(found, requests)
    with (
        registry.open(url) as backend,
        progress("replay", requests or _lines(trace), quiet=json_) as advance,
    ):
        result = replay(
            backend, chosen, page_bytes=page_bytes, batch=batch, seed=seed, advance=advance
        )
    result.bad_lines, result.url = bad_lines, shown_url(url)
    for line in first_bad:
        click.echo(f"left out: {line}", err=True)
    if json_:
        as_json(result)
    else:
        what = trace or f"synthetic trace, seed {seed_of_trace}"
        _print(result, what)
    if result.not_stored_pages and not result.set_pages:
        click.echo("warning: the store took no page: it is full, or opened read-only", err=True)
    if result.mismatched_pages:
        raise SystemExit(1)


def _requests(
    trace: str | None,
    seed: int | None,
    count: int | None,
    on_bad: Callable[[BadLine], None] | None,
) -> Iterator[Request]:
    from l3store.replay import read_trace, synthetic_trace

    if trace is None:
        yield from synthetic_trace(seed or 0, count or 12_000)
        return
    try:
        with open(trace, "rb") as lines:
            yield from read_trace(lines, on_bad=on_bad)
    except OSError as error:
        raise ConfigError(f"trace {trace!r}: {error.strerror}") from error


def _lines(trace: str | None) -> int | None:
    if trace is None:
        return 12_000
    if not os.path.isfile(trace):
        return None  # a pipe can be read only once
    with open(trace, "rb") as lines:
        return sum(1 for _ in lines)


def _print(result: ReplayResult, trace: str) -> None:
    rows: list[tuple[str, Any]] = [
        ("requests", result.requests),
        ("pages", result.pages),
        ("hit pages", result.hit_pages),
        ("set pages", result.set_pages),
        ("evicted pages", result.evicted_pages),
        ("hit share", f"{result.hit_share:.2%}"),
        ("mismatched pages", result.mismatched_pages),
        ("read", _rate(result.read_bytes, result.read_seconds)),
        ("written", _rate(result.written_bytes, result.write_seconds)),
        ("CPU", _cpu(result)),
    ]
    for name, times in (("exists", result.exists), ("get", result.get), ("set", result.set)):
        rows.append((
            f"{name}: p50 / p95 / p99",
            f"{times.p50_ms:.2f} / {times.p95_ms:.2f} / {times.p99_ms:.2f} ms"
            if times.calls else "-",
        ))  # fmt: skip
    for name, count in (
        ("pages promised, not served", result.failed_pages),
        ("pages not stored", result.not_stored_pages),
        ("bad lines left out", result.bad_lines),
    ):
        if count:
            rows.append((name, count))
    size = human_bytes(result.page_bytes)
    title = f"{trace} over {result.url}, {size} a page, {result.batch} pages a call"
    table(("", "result"), rows, title=title)


def _rate(size: int, seconds: float) -> str:
    rate = f", {size / seconds / 1e9:.2f} GB/s" if seconds else ""
    return f"{human_bytes(size)}{rate}"


def _cpu(result: ReplayResult) -> str:
    moved = (result.read_bytes + result.written_bytes) / 1e9
    return f"{result.cpu_seconds / moved:.2f} s/GB" if moved else "-"
