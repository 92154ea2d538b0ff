"""A server's process: waited for, told about when it fails, and gone at the end."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import TYPE_CHECKING

import pytest

from l3store.errors import BackendUnavailable, ConfigError
from l3store.servers.process import HOST, ServerProcess, free_ports, program, wait_until

if TYPE_CHECKING:
    from pathlib import Path

LISTENS = (
    "import socket, sys, time\n"
    "time.sleep(0.2)\n"
    "one = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "time.sleep(60)\n"
)


def python(code: str, *words: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, words)]


def connects(port: int) -> bool:
    with socket.create_connection((HOST, port), timeout=1):
        return True


def test_is_ready_when_it_serves_and_gone_at_the_end(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with ServerProcess(python(LISTENS, port), tmp_path, lambda: connects(port)) as one:
        assert one.running
        assert connects(port)
    assert not one.running
    with pytest.raises(ConnectionRefusedError):
        connects(port)
    one.stop()
    one.kill()


def test_the_end_of_one_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    code = "import sys; print('some words'); sys.exit('no such option')"
    with pytest.raises(BackendUnavailable, match=r"(?s)exit code 1.*no such option"):
        ServerProcess(python(code), tmp_path, lambda: False)


def test_one_that_does_not_serve_in_time_is_ended(tmp_path: Path) -> None:
    code = "import time; print('still loading', flush=True); time.sleep(60)"
    seen: list[float] = []

    def ready() -> bool:
        seen.append(time.monotonic())
        raise ConnectionRefusedError

    with pytest.raises(BackendUnavailable, match="did not serve within"):
        ServerProcess(python(code), tmp_path, ready, seconds=0.3)
    assert len(seen) > 1


def test_one_that_ignores_being_told_to_end_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "server.log"
    one = ServerProcess(python(code), tmp_path, lambda: "up" in log.read_text())
    one.stop(seconds=0.2)
    assert not one.running
    assert one.said() == "up"


def test_an_interrupt_while_it_starts_ends_it(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    code = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupted() -> bool:
        if pids.exists() and pids.read_text():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        ServerProcess(python(code), tmp_path, interrupted)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


def test_a_program_that_is_missing_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="no-such-program is not installed: ask somebody"):
        program("no-such-program", "ask somebody")


def test_ports_are_free_different_and_below_what_is_asked() -> None:
    ports = free_ports(5, below=60_000)
    assert len(set(ports)) == 5
    assert max(ports) < 60_000
    for port in ports:
        socket.create_server((HOST, port)).close()


def test_waiting_ends_with_the_condition_or_says_what_was_waited_for() -> None:
    asked: list[int] = []

    def third_time() -> bool:
        asked.append(0)
        if len(asked) == 2:
            raise ConnectionResetError
        return len(asked) == 3

    wait_until(third_time, "the third time")
    assert len(asked) == 3
    with pytest.raises(BackendUnavailable, match="the moon"):
        wait_until(lambda: False, "the moon", seconds=0.05)
