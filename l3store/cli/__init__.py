"""The command line: ``l3store COMMAND``; one file a command, loaded when it is called."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from l3store import __version__
from l3store.errors import L3Error, nearest

__all__ = ["main"]

# Here and not in the commands, so that help needs none of them.
_COMMANDS = {
    "bench": "Measure a store: get, set and exists, against memcpy in the same run.",
    "dev-server": "Run a Redis, S3 or Mooncake server on this machine, for a first try.",
    "ls": "List namespaces with their descriptors, places and pages.",
    "replay": "Replay a trace of prompts over a store and check every byte.",
    "sglang-config": "Print a checked launch line for SGLang with a store as its L3.",
    "stat": "Say what a store is, how it is and how much it holds.",
    "verify": "Check every page of a store.",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"l3store.cli.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"unknown command {args[0]!r}{nearest(args[0], _COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except L3Error as error:
            if ctx.params["debug"]:
                sys.excepthook(type(error), error, error.__traceback__)
            else:
                click.echo(f"error: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)  # click would say 1, which means that something stored is wrong


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="l3store")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """L3Store: the storage tier for the KV cache of LLM inference engines.

    A store is named by its URL, such as nvme:///mnt/nvme0/l3?capacity=200GiB or file:///mnt/l3.
    Exit codes: 0 good, 1 something stored is wrong, 2 the call is wrong or the store does not
    answer, 130 interrupted.
    """
