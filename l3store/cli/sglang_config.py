"""``l3store sglang-config``: a checked launch line for SGLang with L3Store as its L3."""

from __future__ import annotations

from typing import Any

import click

from l3store import registry
from l3store.cli._shared import as_json, commas, json_option

__all__ = ["command"]


def _stages(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    try:
        return None if value is None else commas(click.IntRange(min=1))(ctx, param, value)
    except click.BadParameter as error:
        raise click.BadParameter(
            f"{value!r} are not layers of stages, such as 20,16", ctx, param
        ) from error


@click.command("sglang-config")
@click.argument("url")
@click.option("--model", required=True, help="A folder, or a name of the hub.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True,
              help="Tensor parallel ranks.")  # fmt: skip
@click.option("--pp", type=click.IntRange(min=1), default=1, show_default=True,
              help="Pipeline stages.")  # fmt: skip
@click.option("--page-size", type=click.IntRange(min=1), default=64, show_default=True,
              help="Tokens of a page.")  # fmt: skip
@click.option("--layout", default="page_first", show_default=True,
              help="Layout of host memory: page_first, page_first_direct, layer_first or "
                   "page_head; the io backend follows.")  # fmt: skip
@click.option("--prefetch-policy", default="timeout", show_default=True,
              help="What a request waits for: best_effort, timeout or wait_complete.")  # fmt: skip
@click.option("--write-policy", default="write_through", show_default=True,
              help="When pages go down: write_through, write_through_selective or "
                   "write_back.")  # fmt: skip
@click.option("--hicache-ratio", type=float,
              help="Host memory (L2) over GPU memory.  [default: SGLang's]")  # fmt: skip
@click.option("--hicache-size", type=click.IntRange(min=1),
              help="GB of host memory (L2) of each rank, in place of the ratio.")  # fmt: skip
@click.option("--tag", help="A word that keeps these pages apart from those of others.")
@click.option("--weights-revision",
              help="Names the weights.  [default: told by the model's files]")  # fmt: skip
@click.option("--dtype", help="Logical KV dtype, where SGLang does not tell it.")
@click.option("--stages", callback=_stages,
              help="Layers of each stage, such as 20,16.  [default: SGLang's]")  # fmt: skip
@click.option("--check", is_flag=True,
              help="Open the store too, and make it where it is missing; run it as the user that "
                   "serves.")  # fmt: skip
@json_option
def command(url: str, check: bool, json_: bool, **wanted: Any) -> None:
    """Print a launch line for SGLang whose L3 is the store at URL; append flags of your own to it.

    Standard output holds nothing else: the line, or with --json the value of
    --hicache-storage-backend-extra-config alone. That value may also be @FILE; the name must end in
    .json. Options of the store stand in its URL: its backend's, and deadline, late and breaker_*
    (docs/configuration.md).

    Checked is all that can be known without SGLang. The store is looked at, not opened for writing,
    unless --check. Exit code 2: SGLang or the store would not take this.
    """
    from l3store.adapters.sglang.launch import Launch, look_at_store

    launch = Launch(url=url, **wanted)
    warnings = launch.warnings() + look_at_store(launch)
    if check:
        with registry.open(url) as store:
            store.health()
    if json_:
        as_json(launch.extra_config())
    else:
        click.echo(launch.line())
        threshold = launch.extra_config()["prefetch_threshold"]
        click.echo(
            f"\nTo see hits: send a prompt of more than {threshold} tokens, POST /flush_cache, "
            "send it again. Its tokens from L3: meta_info.cached_tokens_details.storage of "
            '/generate; sglang:cached_tokens_total{cache_source="storage"} with --enable-metrics; '
            '"get read" in lines of the log that begin with "L3Store".',
            err=True,
        )
    for warning in warnings:
        click.secho(f"warning: {warning}", err=True, bold=True)
