"""A Mooncake master and the processes that lend it memory, from the PyPI wheel.

The master knows which page lies where and holds none; the pages lie in the memory of the owners,
``mooncake_client`` processes, so that they outlive the processes that wrote them. Both programs
stand in every Mooncake wheel (extras ``mooncake``, ``mooncake-cuda13``, ``mooncake-cpu``).

Master and admin port listen on 127.0.0.1. An owner's two transfer ports are chosen by the library
and listen on every address of the machine: it has no setting for that.
"""

from __future__ import annotations

import os
import stat
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from l3store.errors import ConfigError
from l3store.servers.local_server import LocalServer
from l3store.servers.process import HOST, ServerProcess, free_ports, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LEAST_SEGMENT", "MooncakeServer"]

LEAST_SEGMENT = 16 << 20
"""Bytes that an owner must lend at least (the library refuses less)."""
_ANSWER = 1.0  # seconds


class MooncakeServer(LocalServer):
    """A running master on 127.0.0.1 with owners of memory, empty at its start.

    Starting blocks until memory is mounted, about 0.3 s. From any thread; but it ends when the
    thread that started it ends.

    Args:
        folder: For logs, kept; None for a new one that goes with it.
        port: Of the master; None for a free one.
        segment: Bytes that each owner lends, at least `LEAST_SEGMENT`.
        owners: How many processes lend memory.
        settings: Flags of ``mooncake_master`` over those made here.

    Raises:
        ConfigError: The wheel is not installed, or `segment` is too small.
        BackendUnavailable: It did not serve in time.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        port: int | None = None,
        segment: int = 1 << 30,
        owners: int = 1,
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        if segment < LEAST_SEGMENT:
            raise ConfigError(f"an owner lends at least {LEAST_SEGMENT} bytes, not {segment}")
        self._programs = _package()
        super().__init__(folder, "mooncake")
        self._segment, self._settings = segment, dict(settings or {})
        self.owners: list[ServerProcess] = []
        """The processes that lend memory; a killed one stays in the list."""
        try:
            self._start_on_a_port(port)
            for _ in range(owners):
                self.add_owner()
        except BaseException:
            self.stop()
            raise

    # -- where it is -----------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The store's URL, with the admin port."""
        return f"mooncake://{HOST}:{self.port}?protocol=tcp&admin={self.admin_port}"

    def segments(self) -> dict[str, tuple[int, int]]:
        """Returns name -> (bytes used, bytes lent) of all memory that is mounted.

        Raises:
            OSError: The master does not answer.
        """
        found = msgspec.json.decode(self.ask("/get_segments_detail"), type=_Segments)
        return {
            one.segment_name: (one.allocator_used_bytes, one.size_bytes) for one in found.segments
        }

    def keys(self) -> list[str]:
        """Returns the names of all objects, whoever stored them.

        Raises:
            OSError: The master does not answer.
        """
        return self.ask("/get_all_keys").decode().split("\n")[:-1]

    def ask(self, path: str) -> bytes:
        """Returns what the admin port answers.

        Raises:
            OSError: The master does not answer.
        """
        connection = HTTPConnection(HOST, self.admin_port, timeout=_ANSWER)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ConnectionError(f"{path} is answered with HTTP {answer.status}")
            return answer.read()
        except HTTPException as error:
            raise ConnectionError(f"{path} is not answered: {error!r}") from error
        finally:
            connection.close()

    # -- what happens to it ------------------------------------------------------------------

    def restart(self) -> None:
        """Ends the master and starts it again at the same ports: it knows no page any more.

        Blocks until the owners that live have mounted their memory again, about 2 s.
        """
        self._process.kill()
        self._start()
        living = sum(owner.running for owner in self.owners)
        wait_until(lambda: len(self.segments()) == living, "memory is mounted")

    def add_owner(self) -> ServerProcess:
        """Starts one more process that lends memory, and waits until it is mounted."""
        folder = self.folder / f"owner-{len(self.owners)}"
        folder.mkdir(exist_ok=True)
        known = set(self.segments())
        flags: dict[str, str | int] = {
            "host": HOST, "port": free_ports(1)[0], "protocol": "tcp", "threads": 1,
            "metadata_server": "P2PHANDSHAKE", "master_server_address": f"{HOST}:{self.port}",
            "global_segment_size": self._segment, "local_buffer_size": 0, "logtostderr": 1,
        }  # fmt: skip
        command = _command(self._programs / "mooncake_client", flags)
        owner = ServerProcess(command, folder, lambda: not known.issuperset(self.segments()))
        self.owners.append(owner)
        return owner

    def stop(self) -> None:
        """Ends all processes and removes the folder, if it made that. Idempotent."""
        for owner in self.owners:
            owner.kill()  # asked to end it would wait for the master
        super().stop()

    # -- starting ----------------------------------------------------------------------------

    def _choose_ports(self, port: int | None) -> None:
        self.port, self.admin_port = free_ports(2)
        self.port = port or self.port

    def _start(self) -> None:
        folder = self.folder / "master"
        folder.mkdir(exist_ok=True)
        flags: dict[str, str | int] = {
            "rpc_address": HOST, "rpc_port": self.port, "rpc_thread_num": 2,
            "metrics_host": HOST, "metrics_port": self.admin_port, "logtostderr": 1,
            "enable_metric_reporting": "false", "client_ttl": 10,
        }  # fmt: skip
        flags |= self._settings
        command = _command(self._programs / "mooncake_master", flags)
        self._process = ServerProcess(command, folder, lambda: b'"ok"' in self.ask("/health"))


class _Segment(msgspec.Struct):
    segment_name: str
    size_bytes: int
    allocator_used_bytes: int


class _Segments(msgspec.Struct):
    segments: list[_Segment] = []


def _package() -> Path:
    """Returns the folder of the wheel, which holds the programs."""
    spec = find_spec("mooncake")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / "mooncake_master").exists():
            return Path(folder)
    raise ConfigError("mooncake_master is not installed: pip install 'l3store[mooncake-cpu]'")


def _command(program: Path, flags: Mapping[str, str | int]) -> list[str]:
    if not os.access(program, os.X_OK):  # some installers drop it
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return [str(program), *(f"--{name}={value}" for name, value in flags.items())]
