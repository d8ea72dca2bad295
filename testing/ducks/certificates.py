"""Certificates for tests, made with the openssl command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vllm_duck.executor.wire.security import ClientSecurity, ServerSecurity

_SETTINGS = """
[ca]
database = index
serial = serial
default_md = sha256
policy = any
x509_extensions = names
email_in_dn = no
rand_serial = yes
[any]
commonName = supplied
[names]
subjectAltName = $ENV::NAMES
"""
# What a duck on loopback is called.
LOOPBACK = "DNS:localhost,IP:127.0.0.1"
_EC_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


def have_openssl() -> bool:
    return shutil.which("openssl") is not None


@dataclass(frozen=True)
class Certificate:
    """Two PEM files, and that of their authority."""

    cert: str
    key: str
    ca: str

    def server(self, *, asks_hosts: bool = False, **options: str) -> ServerSecurity:
        ca = self.ca if asks_hosts else None
        return ServerSecurity.from_files(
            tls_cert=self.cert, tls_key=self.key, tls_ca=ca, **options
        )

    def client(self, *, shows: bool = False, **options: str) -> ClientSecurity:
        """shows: the certificate, to ducks that ask for one."""
        cert, key = (self.cert, self.key) if shows else (None, None)
        return ClientSecurity.from_files(
            tls_ca=self.ca, tls_cert=cert, tls_key=key, **options
        )


class Authority:
    """Signs certificates; its files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings").write_text(_SETTINGS)
        (folder / "index").touch()
        (folder / "index.attr").write_text("unique_subject = no\n")
        self._openssl(
            f"req -x509 {_EC_KEY} -days 2 -subj /CN=authority "
            "-keyout ca.key -out ca.pem"
        )

    def sign(
        self, name: str, names: str = "DNS:localhost", *, is_expired: bool = False
    ) -> Certificate:
        """name: of its files; a second one of the same name replaces them."""
        self._openssl(
            f"req -new {_EC_KEY} -subj /CN={name} -keyout {name}.new -out {name}.req"
        )
        days = "-days 2"
        if is_expired:
            days = "-startdate 20200101000000Z -enddate 20200102000000Z"
        self._openssl(
            "ca -batch -notext -config settings -name ca -cert ca.pem -keyfile ca.key "
            f"-outdir . {days} -in {name}.req -out {name}.pem",
            NAMES=names,
        )
        (self._folder / f"{name}.new").rename(self._folder / f"{name}.key")
        return Certificate(
            *(str(self._folder / file) for file in (f"{name}.pem", f"{name}.key")),
            ca=str(self._folder / "ca.pem"),
        )

    def _openssl(self, arguments: str, **environ: str) -> None:
        done = subprocess.run(
            ["openssl", *arguments.split()],
            cwd=self._folder,
            env={"PATH": "/usr/bin:/bin:/usr/local/bin", **environ},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
