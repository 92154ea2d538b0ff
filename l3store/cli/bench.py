"""``l3store bench``: throughput, CPU and latency of a store, against memcpy in the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from l3store import registry
from l3store.cli._shared import SIZE, as_json, commas, human_bytes, json_option, progress, table
from l3store.config import StoreURL

if TYPE_CHECKING:
    from l3store.bench import BenchResult

__all__ = ["command"]


@click.command("bench")
@click.argument("url")
@click.option("--op", "ops", default="set,get,exists", show_default=True,
              callback=commas(click.STRING, ("set", "get", "exists")),
              help="What to measure; pages are stored in any case.")  # fmt: skip
@click.option("--page-bytes", default="64KiB,128KiB,1MiB", show_default=True,
              callback=commas(SIZE), help="Payload of a page.")  # fmt: skip
@click.option("--segments", default="1,2,64", show_default=True,
              callback=commas(click.IntRange(min=1)),
              help="Pieces in which a page lies in host memory.")  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), default=128, show_default=True,
              help="Pages a call.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True,
              help="Rates are medians over them.")  # fmt: skip
@click.option("--cache", type=click.Choice(["cold", "warm", "any"]), default="any",
              show_default=True,
              help="Page cache before reads: dropped, filled, or as it is.")  # fmt: skip
@click.option("--working-set", type=SIZE, default="1GiB", show_default=True,
              help="Payload stored at one time.")  # fmt: skip
@click.option("--shuffle", is_flag=True, help="Read in another order than written.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--raw", is_flag=True, help="The bare backend: no checksums, deadline or breaker.")
@json_option
def command(
    url: str,
    ops: tuple[str, ...],
    page_bytes: tuple[int, ...],
    segments: tuple[int, ...],
    batch: int,
    rounds: int,
    cache: Literal["cold", "warm", "any"],
    working_set: int,
    shuffle: bool,
    seed: int,
    raw: bool,
    json_: bool,
) -> None:
    """Measure get, set and exists of the store at URL.

    Each call is paired with a memcpy of the same bytes, page by page, between buffers larger than
    the CPU caches: "of memcpy" is the share of its speed. GB are 10^9 bytes of payload. Checksums
    of written pages are made before the timed part; those of read pages are checked inside it,
    unless --raw. After each read every byte is compared, outside the timed part.

    "Device" counts, for get and exists, the bytes that this process made the kernel read from the
    device during the timed part (read_bytes of /proc/self/io); for set, the bytes written to the
    store's device meanwhile by anybody (/sys/dev/block). "Cache" is what they prove: cold from 95 %
    of the payload, warm up to 1 %, else mixed; "ram" is a store in memory; "remote" one whose
    bytes come from another process, where neither is known. For set, "page cache" means that the
    bytes had not reached the device when the calls ended.

    Pages live in the namespace l3store-bench and are removed at the end; empty folders may stay. A
    store with a capacity may evict other pages to make room for them. Exit code 1: a page was read
    as good and was wrong.
    """
    from l3store.bench import Plan, bench

    plan = Plan(
        ops=ops, page_bytes=page_bytes, segments=segments, batch=batch, rounds=rounds,
        cache=cache, working_set=working_set, shuffle=shuffle, seed=seed,
    )  # fmt: skip
    timed = len(ops) * len(segments) * rounds * sum(plan.pages(size) for size in page_bytes)
    with (
        registry.open(url, raw=raw) as backend,
        progress("bench", timed, quiet=json_) as advance,
    ):
        result = bench(backend, plan, StoreURL.parse(url), raw=raw, advance=advance)
    if json_:
        as_json(result)
    else:
        _print(result)
    for note in result.notes:
        click.secho(note, err=True, bold=True)
    if result.mismatched_pages:
        raise SystemExit(1)


def _print(result: BenchResult) -> None:
    rows = []
    for row in result.rows:
        rates = [
            "-" if value is None else f"{value:.2f}"
            for value in (row.gb_s, row.memcpy_gb_s, row.of_memcpy, row.cpu_s_gb)
        ]
        rows.append((
            row.op, row.page_bytes >> 10, row.segments, *rates,
            f"{row.p50_ms:.2f}", f"{row.p95_ms:.2f}", f"{row.p99_ms:.2f}", row.cache,
            "-" if row.device_bytes is None else human_bytes(row.device_bytes),
            row.missed_pages, row.mismatched_pages,
        ))  # fmt: skip
    columns = ("op", "KiB a page", "segments", "GB/s", "memcpy GB/s", "of memcpy", "CPU s/GB",
               "p50 ms", "p95 ms", "p99 ms", "cache", "device", "missed", "wrong")  # fmt: skip
    first = result.rows[0]
    title = (
        f"{result.url}: {first.batch} pages a call, {human_bytes(result.working_set)} stored at a "
        f"time, read {result.order}, median of {result.rounds} rounds, "
        f"verify {'on' if result.verify else 'off'}, cache asked: {result.cache_asked}"
    )
    table(columns, rows, title=title)
    click.echo(f"stack: {result.stack}\nruler: {result.ruler}\nwarm-up: {result.warm_up}")
