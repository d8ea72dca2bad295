"""The certificates of an end of the native stream, as C++ takes them.

Where they came from files, C++ reads those itself, and again when they have changed: a
new connection gets what is there then.
"""

import logging

from vllm_duck.errors import DuckConfigError
from vllm_duck.executor import _stream
from vllm_duck.executor.wire.security import ClientSecurity, ServerSecurity

logger = logging.getLogger(__name__)


def client_tls(security: ClientSecurity) -> object | None:
    """What `client_new` takes; None: the connections are plain.

    Raises:
        DuckConfigError: a file holds no certificate or key, or they do not fit.
    """
    return None if security.tls_ca is None else _context(security, is_server=False)


def server_tls(security: ServerSecurity) -> object | None:
    """The same for `server_new`."""
    return None if security.tls_cert is None else _context(security, is_server=True)


def log_stale_files(why: str) -> None:
    """Say that files which have changed are not used."""
    logger.warning(
        "certificates that have changed cannot be used (%s); new connections get the "
        "former ones until they can",
        why,
    )


def _context(security: ClientSecurity | ServerSecurity, *, is_server: bool) -> object:
    sources: list[str] = []
    for name in ("tls_ca", "tls_cert", "tls_key"):
        pem: bytes | None = getattr(security, name)
        sources += [security.tls_paths.get(name, ""), (pem or b"").decode("latin-1")]
    try:
        return _stream.tls_new(is_server, *sources)
    except ValueError as error:
        raise DuckConfigError(f"TLS cannot be set up: {error}") from error
