"""What all servers here have in common: a folder, ports, and one process that serves."""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from l3store.errors import BackendUnavailable
from l3store.servers.process import HOST, listened_on

if TYPE_CHECKING:
    from typing import Self

    from l3store.servers.process import ServerProcess

__all__ = ["TRIES", "LocalServer"]

TRIES = 5
"""Free ports may be taken between finding and binding them."""


class LocalServer(ABC):
    """A server on 127.0.0.1 that ends when the thread that started it ends.

    Args:
        folder: Where it keeps everything; None for a new one that goes with it.
        kind: Stands in the name of a new folder.
    """

    _taken: ClassVar[type[BackendUnavailable]] = BackendUnavailable
    """What `_start` raises where other ports may help."""
    _process: ServerProcess

    def __init__(self, folder: Path | None, kind: str) -> None:
        self._made = tempfile.mkdtemp(prefix=f"l3store-{kind}-") if folder is None else ""
        self.folder = Path(self._made) if folder is None else folder

    @property
    def process(self) -> ServerProcess:
        """The process that serves, or served last."""
        return self._process

    @property
    def running(self) -> bool:
        """False once it has ended."""
        return self._process.running

    def said(self) -> str:
        """Returns the end of what it printed."""
        return self._process.said()

    def freeze(self) -> None:
        """Stops it where it stands: connections stay open, nobody answers."""
        self._process.freeze()

    def thaw(self) -> None:
        """Lets it go on after `freeze`."""
        self._process.thaw()

    def kill(self) -> None:
        """Ends it at once; `restart` brings it back."""
        self._process.kill()

    def stop(self) -> None:
        """Ends it and removes its folder, if it made that. Idempotent."""
        if hasattr(self, "_process"):
            self._end()
        if self._made:
            shutil.rmtree(self._made, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _start_on_a_port(self, port: int | None, *, tries: int = 0) -> None:
        """Starts it; on other ports again where some were taken, if none is told."""
        if port and not tries and listened_on(port):
            raise self._taken(f"port {port} of {HOST} is taken")  # servers say so in many words
        for left in reversed(range(tries or (1 if port else TRIES))):
            self._choose_ports(port)
            try:
                return self._start()
            except self._taken:
                if not left:
                    raise

    def _end(self) -> None:
        self._process.stop()

    @abstractmethod
    def _choose_ports(self, port: int | None) -> None:
        """Sets the ports that `_start` uses; `port` is the first one, if it is told."""

    @abstractmethod
    def _start(self) -> None:
        """Starts `_process` and waits until it serves."""
