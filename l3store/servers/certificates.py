"""Certificates for servers on 127.0.0.1, made anew by the program ``openssl``."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from l3store.errors import ConfigError
from l3store.servers.process import HOST, program

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Certificates"]

_DAYS = "30"
_EXTENSIONS = f"""\
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:{HOST}, DNS:localhost
"""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files."""

    ca: Path
    """Has signed `certificate`."""
    certificate: Path
    """Of 127.0.0.1 and localhost, for servers and clients."""
    key: Path
    """Of `certificate`; without a password."""
    wrong_ca: Path
    """Has signed nothing; its name is that of `ca`."""

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """Writes them into a folder that is there. Valid for 30 days; takes a tenth of a second.

        Raises:
            ConfigError: The program ``openssl`` is not installed or fails.
        """
        (folder / "extensions").write_text(_EXTENSIONS)
        for name in ("ca", "wrong-ca"):
            _openssl(
                folder, "req", "-x509", "-config", "extensions", "-extensions", "authority",
                *_new_key(name), "-out", f"{name}.crt", "-days", _DAYS, "-subj", "/CN=L3Store CA",
            )  # fmt: skip
        _openssl(
            folder, "req", "-new", "-config", "extensions",
            *_new_key("server"), "-out", "server.csr", "-subj", f"/CN={HOST}",
        )  # fmt: skip
        _openssl(
            folder, "x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
            "-set_serial", "1", "-days", _DAYS, "-out", "server.crt",
            "-extfile", "extensions", "-extensions", "server",
        )  # fmt: skip
        return cls(
            ca=folder / "ca.crt", certificate=folder / "server.crt", key=folder / "server.key",
            wrong_ca=folder / "wrong-ca.crt",
        )  # fmt: skip


def _new_key(name: str) -> tuple[str, ...]:
    return (
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-keyout",
        f"{name}.key",
    )


def _openssl(folder: Path, *arguments: str) -> None:
    command = [program("openssl", "apt install openssl"), *arguments]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    if ran.returncode:
        raise ConfigError(f"openssl {arguments[0]} failed: {ran.stderr.strip()}")
