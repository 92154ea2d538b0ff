"""The Mooncake server of tests and first tries."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from l3store.errors import BackendUnavailable, ConfigError
from l3store.servers.mooncake import LEAST_SEGMENT, MooncakeServer
from l3store.servers.mooncake_client import BareClient
from tests.network.conftest import start


@pytest.fixture
def stack():
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield stack


def test_it_serves_lends_memory_and_leaves_nothing(stack):
    began = time.monotonic()
    server = start(stack, MooncakeServer, segment=32 << 20, owners=2)
    assert time.monotonic() - began < 10
    assert sorted(size for _, size in server.segments().values()) == [32 << 20] * 2
    assert server.keys() == []
    client = BareClient(server.port)
    client.write("a/b", b"bytes")
    assert client.read("a/b") == b"bytes"
    assert server.keys() == ["a/b"]
    pids = [server.process.pid, *(owner.pid for owner in server.owners)]
    folder = server.folder
    assert (folder / "master" / "server.log").exists()
    server.stop()
    server.stop()
    assert not folder.exists()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_a_folder_that_was_given_is_kept(stack, tmp_path):
    server = start(stack, MooncakeServer, folder=tmp_path, segment=LEAST_SEGMENT)
    server.stop()
    assert (tmp_path / "master" / "server.log").exists()
    assert (tmp_path / "owner-0" / "server.log").exists()


def test_restarted_it_is_empty_and_its_owners_are_back(stack):
    server = start(stack, MooncakeServer, segment=LEAST_SEGMENT)
    BareClient(server.port).write("a/b", b"bytes")
    port, process = server.port, server.process.pid
    server.restart()
    assert (server.port, server.process.pid != process) == (port, True)
    assert server.keys() == []
    assert len(server.segments()) == 1


def test_a_port_that_is_taken_and_too_little_memory_are_told(stack):
    server = start(stack, MooncakeServer, segment=LEAST_SEGMENT)
    with pytest.raises(BackendUnavailable, match=f"port {server.port} of 127.0.0.1 is taken"):
        MooncakeServer(port=server.port)
    with pytest.raises(ConfigError, match=str(LEAST_SEGMENT)):
        MooncakeServer(segment=1000)


_DIES = """
import os, signal
from l3store.servers.mooncake import MooncakeServer
server = MooncakeServer(segment=16 << 20)
print(server.process.pid, server.owners[0].pid, server.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_the_process_that_started_it(stack, tmp_path):
    start(stack, MooncakeServer, segment=LEAST_SEGMENT).stop()  # skips where it is not installed
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _DIES], capture_output=True, text=True, timeout=60, env=environment
    )
    *pids, _ = done.stdout.split()
    limit = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < limit, "it outlives its parent"
        time.sleep(0.02)
