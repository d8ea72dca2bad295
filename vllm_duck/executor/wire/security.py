"""TLS files and the shared token, as the two ends of a connection are given them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_duck.endpoints import check_endpoint, is_local
from vllm_duck.errors import DuckConfigError


@dataclass(frozen=True)
class ClientSecurity:
    """How a host proves itself to its ducks, and checks them."""

    # Certificate authority of the ducks; with it, connections use TLS.
    tls_ca: bytes | None = field(default=None, repr=False)
    # The host's own certificate and key, for ducks that ask for one.
    tls_cert: bytes | None = field(default=None, repr=False)
    tls_key: bytes | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    # Where they were read, by the names above; for those who read them again.
    tls_paths: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise DuckConfigError("tls_cert and tls_key must be given together")
        if self.tls_cert is not None and self.tls_ca is None:
            raise DuckConfigError("tls_cert needs tls_ca, the authority of the ducks")

    @classmethod
    def from_files(
        cls,
        *,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        token_file: str | None = None,
    ) -> "ClientSecurity":
        return cls(
            tls_ca=_read_optional("tls_ca", tls_ca),
            tls_cert=_read_optional("tls_cert", tls_cert),
            tls_key=_read_optional("tls_key", tls_key),
            token=None if token_file is None else read_token(token_file),
            tls_paths=_paths(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key),
        )

    def read_again(self) -> "ClientSecurity":
        """The same, with what its TLS files hold now; as it is while one is gone."""
        try:
            found = {name: _read(name, path) for name, path in self.tls_paths.items()}
        except DuckConfigError:
            return self
        return replace(
            self,
            tls_ca=found.get("tls_ca", self.tls_ca),
            tls_cert=found.get("tls_cert", self.tls_cert),
            tls_key=found.get("tls_key", self.tls_key),
        )


@dataclass(frozen=True)
class ServerSecurity:
    """Whom a duck lets in."""

    tls_cert: bytes | None = field(default=None, repr=False)
    tls_key: bytes | None = field(default=None, repr=False)
    # Authority of the hosts; with it, a host must show a certificate.
    tls_ca: bytes | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    # Listen beyond this machine with neither TLS nor a token.
    is_insecure: bool = False
    # Where they were read, by the names above; for those who read them again.
    tls_paths: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise DuckConfigError("--tls-cert and --tls-key must be given together")
        if self.tls_ca is not None and self.tls_cert is None:
            raise DuckConfigError("--tls-ca needs --tls-cert and --tls-key")

    @classmethod
    def from_files(
        cls,
        *,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_ca: str | None = None,
        token_file: str | None = None,
        is_insecure: bool = False,
    ) -> "ServerSecurity":
        return cls(
            tls_cert=_read_optional("--tls-cert", tls_cert),
            tls_key=_read_optional("--tls-key", tls_key),
            tls_ca=_read_optional("--tls-ca", tls_ca),
            token=None if token_file is None else read_token(token_file),
            is_insecure=is_insecure,
            tls_paths=_paths(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key),
        )

    def check_listen(self, endpoint: str) -> None:
        """Refuse to open a duck to the network without any protection.

        Raises:
            DuckConfigError: the endpoint is no endpoint, or it is not local and
                nothing guards it.
        """
        is_guarded = self.tls_cert is not None or self.token is not None
        check_endpoint(endpoint, is_listening=True)
        if is_local(endpoint) or is_guarded or self.is_insecure:
            return
        raise DuckConfigError(
            f"listening on {endpoint} opens the duck to the network: give --tls-cert "
            "and --tls-key, or --token-file, or say --insecure"
        )


def read_token(path: str) -> str:
    """Read a shared token: the file's content without surrounding white space.

    Raises:
        DuckConfigError: the file is empty, unreadable, or no header-safe text.
    """
    content = _read("token_file", path)
    try:
        token = content.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise DuckConfigError(f"token_file {path} must be ASCII text") from error
    if not token or not token.isprintable():
        raise DuckConfigError(
            f"token_file {path} must hold one line of printable text, and is "
            f"{'empty' if not token else 'not'}"
        )
    return token


def _paths(**paths: str | None) -> dict[str, str]:
    return {name: path for name, path in paths.items() if path is not None}


def _read_optional(knob: str, path: str | None) -> bytes | None:
    return None if path is None else _read(knob, path)


def _read(knob: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DuckConfigError(f"cannot read {knob} {path}: {error.strerror}") from error
