"""One server process: started, waited for, frozen, killed, and never left behind."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from l3store.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Self

__all__ = ["HOST", "ServerProcess", "free_ports", "listened_on", "program", "wait_until"]

HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)
_SAID = 2000  # characters of a server's log that a message shows


def program(name: str, hint: str) -> str:
    """Returns the path of an installed program: that of this Python's environment, or in PATH.

    Raises:
        ConfigError: It is not installed; `hint` says how to get it.
    """
    ours = os.path.dirname(sys.executable)  # where a wheel puts it; PATH may not lead there
    path = shutil.which(name, path=f"{ours}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if path is None:
        raise ConfigError(f"{name} is not installed: {hint}")
    return path


def free_ports(count: int, *, below: int = 65536) -> list[int]:
    """Returns ports of 127.0.0.1 that nobody listens on now, each below `below`.

    Another process may take one before it is used: start the server anew with others then.
    """
    found: list[int] = []
    held: list[socket.socket] = []
    try:
        while len(found) < count:
            taken = socket.socket()
            held.append(taken)
            taken.bind((HOST, 0))
            port = taken.getsockname()[1]
            if port < below:
                found.append(port)
    finally:
        for one in held:
            one.close()
    return found


def listened_on(port: int) -> bool:
    """Returns whether somebody listens on a port of 127.0.0.1."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what has ended does not count
        try:
            one.bind((HOST, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = 20.0) -> None:
    """Blocks until a condition holds. An `OSError` of it (nobody answers) counts as not yet.

    Raises:
        BackendUnavailable: It does not hold after `seconds`; `what` names it in the message.
    """
    limit = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if condition():
                return
        if time.monotonic() > limit:
            raise BackendUnavailable(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


class ServerProcess:
    """A running server. Ends with the thread's process that started it, whatever ends that one.

    Args:
        command: Program and arguments.
        folder: Where it runs and where its output goes (``server.log``).
        ready: Raises `OSError` or returns False as long as the server does not serve.
        seconds: For it to serve.
        environment: Added to that of this process.

    Raises:
        BackendUnavailable: It ended, or did not serve in time; the message has its last output.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        ready: Callable[[], bool],
        *,
        seconds: float = 20.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = os.path.basename(command[0])
        self._log = folder / "server.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | dict(environment or {}), preexec_fn=_die_with_parent,
            )  # fmt: skip
        try:
            self._wait_until(ready, seconds)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """False once it has ended."""
        return self._process.poll() is None

    def freeze(self) -> None:
        """Stops it where it stands: connections stay open, nobody answers."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on after `freeze`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it at once; returns when it is gone. Idempotent."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def stop(self, seconds: float = 5.0) -> None:
        """Lets it end by itself, and kills it after `seconds`. Idempotent."""
        if self.running:
            self.thaw()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self.kill()

    def said(self) -> str:
        """Returns the end of what it printed."""
        return self._log.read_text(errors="replace")[-_SAID:].strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while True:
            if not self.running:
                raise BackendUnavailable(
                    f"{self.name} ended with exit code {self._process.returncode}: {self.said()}"
                )
            with suppress(OSError):
                if ready():
                    return
            if time.monotonic() > limit:
                raise BackendUnavailable(
                    f"{self.name} did not serve within {seconds:g} s: {self.said()}"
                )
            time.sleep(0.02)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
