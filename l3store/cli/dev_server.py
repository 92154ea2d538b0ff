"""``l3store dev-server``: a real server on this machine, for a first try; gone when stopped."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from l3store.cli._shared import SIZE, human_bytes
from l3store.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["command"]

_MEMORY = 1 << 30
_LOOKS = 0.2  # seconds between two looks at whether the server still runs


class _Server(Protocol):
    @property
    def url(self) -> str: ...
    @property
    def running(self) -> bool: ...
    def said(self) -> str: ...


class _Started:
    """A running server, and what a user may want to know of it."""

    def __init__(
        self, stack: ExitStack, server: AbstractContextManager[_Server], *hints: str
    ) -> None:
        self.server = stack.enter_context(server)
        self.hints = hints


def _redis(stack: ExitStack, folder: Path | None, port: int | None, memory: int | None) -> _Started:
    from l3store.servers.redis import RedisServer

    most = memory or _MEMORY
    server = RedisServer(folder, port=port, maxmemory=most)
    unix = f"the same by its unix socket: {server.unix_url}" if server.unix_path else ""
    return _Started(
        stack, server, f"{human_bytes(most)} of memory, evicts the least recently used", unix
    )


def _s3(stack: ExitStack, folder: Path | None, port: int | None, memory: int | None) -> _Started:
    from l3store.servers.s3 import S3Server

    if memory is not None:
        raise ConfigError("--memory is of redis and mooncake: the S3 server keeps pages on disk")
    server = S3Server(folder, port=port)
    return _Started(stack, server, f"keeps its objects in {server.folder}")


def _mooncake(
    stack: ExitStack, folder: Path | None, port: int | None, memory: int | None
) -> _Started:
    from l3store.servers.mooncake import MooncakeServer

    most = memory or _MEMORY
    server = MooncakeServer(folder, port=port, segment=most)
    return _Started(stack, server, f"a master, and a process that lends {human_bytes(most)}")


_KINDS: dict[str, Callable[[ExitStack, Path | None, int | None, int | None], _Started]] = {
    "mooncake": _mooncake,
    "redis": _redis,
    "s3": _s3,
}


@click.command("dev-server")
@click.argument("kind", type=click.Choice(sorted(_KINDS)))
@click.option("--port", type=click.IntRange(1, 65535), help="Its port; default: a free one.")
@click.option(
    "--dir", "folder", type=click.Path(file_okay=False, path_type=Path),
    help="Where it runs, made if need be and kept; default: a temporary folder.",
)  # fmt: skip
@click.option("--memory", type=SIZE, help="What it may hold, such as 4GiB; default: 1GiB.")
def command(kind: str, port: int | None, folder: Path | None, memory: int | None) -> None:
    """Start a server on 127.0.0.1 and print the URL of a store in it, until Ctrl-C or SIGTERM.

    The first line of standard output is the URL and nothing else; hints go to standard error.
    It is for a first try and for tests, not for a fleet. Only this machine can reach it, but for
    the memory of a Mooncake: its library listens on all addresses, and has no setting for that.
    """
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _told)
        if folder is not None:
            folder = folder.absolute()
            _make(folder)
        started = _KINDS[kind](stack, folder, port, memory)
        click.echo(started.server.url)
        url = shlex.quote(started.server.url)
        hints = (
            *started.hints,
            f"fill it: l3store replay --synthetic 1 --requests 20 --page-bytes 1MiB --url {url}",
            f"see it: l3store stat {url}",
            "Ctrl-C ends it",
        )
        click.echo("\n".join(f"{kind}: {hint}" for hint in hints if hint), err=True)
        while started.server.running:
            time.sleep(_LOOKS)
        raise BackendUnavailable(f"the server has ended: {started.server.said()}")


def _told(*_: object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # or a second Ctrl-C ends the tidying up
    sys.exit(0)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dir {folder}: {error.strerror}") from error
