"""What an endpoint may look like, and which of them stay on this machine."""

import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from vllm_duck.errors import DuckConfigError

UNIX_PREFIX = "unix:"
_REPLICAS = "|"
# sun_path holds 108 bytes, the last of them zero.
MAX_SOCKET_PATH_BYTES = 107

_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_PORT = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)


def check_endpoint(endpoint: str, *, is_listening: bool = False) -> str:
    """Return the endpoint if it is `unix:/path`, `host:port` or `[IPv6]:port`.

    is_listening: port 0 is one that the system chooses.

    Raises:
        DuckConfigError: it is none of them.
    """
    if endpoint.startswith(UNIX_PREFIX):
        _check_path(endpoint)
        return endpoint
    host, _, port = endpoint.rpartition(":")
    if _is_ipv6(host) or _is_ipv6(endpoint):
        shown = f"[{host}]:{port}" if _is_ipv6(host) else f"[{endpoint}]:PORT"
        raise DuckConfigError(
            f"an IPv6 address must stand in brackets, as in {shown}, got {endpoint!r}"
        )
    is_host = _HOST_NAME.fullmatch(host) or _is_ipv6(_without_brackets(host))
    if not is_host or not _PORT.fullmatch(port):
        raise DuckConfigError(
            f"an endpoint must be host:port or unix:/path, got {endpoint!r}; correct "
            "it in duck.endpoints, VLLM_DUCK_ENDPOINTS or --listen"
        )
    if int(port) > 65535 or (int(port) == 0 and not is_listening):
        raise DuckConfigError(
            f"an endpoint must have a port from 1 to 65535, got {endpoint!r}; port 0, "
            "for any free one, is for --listen alone"
        )
    return endpoint


def replicas_of(duck: str) -> tuple[str, ...]:
    """The endpoints of one duck: one, or those of its replicas, separated by `|`.

    Raises:
        DuckConfigError: one of them is no endpoint.
    """
    return tuple(check_endpoint(each.strip()) for each in duck.split(_REPLICAS))


def join_replicas(endpoints: Sequence[str]) -> str:
    return _REPLICAS.join(endpoints)


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Read the comma-separated list of VLLM_DUCK_ENDPOINTS; empty text names none.

    Raises:
        DuckConfigError: an entry is no endpoint, or empty.
    """
    if not text:
        return ()
    parts = tuple(part.strip() for part in text.split(","))
    if "" in parts:
        raise DuckConfigError(
            f"endpoints must be separated by single commas, got {text!r}; remove the "
            "comma that has no endpoint beside it"
        )
    return tuple(join_replicas(replicas_of(part)) for part in parts)


def split_host_port(endpoint: str) -> tuple[str, int]:
    """Host without brackets, and port, of a checked endpoint that is no socket's."""
    host, _, port = endpoint.rpartition(":")
    return _without_brackets(host) or host, int(port)


def join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def remove_socket(endpoint: str) -> None:
    """Of a unix endpoint, the file."""
    if endpoint.startswith(UNIX_PREFIX):
        Path(endpoint.removeprefix(UNIX_PREFIX)).unlink(missing_ok=True)


def is_local(endpoint: str) -> bool:
    """Whether only processes of this machine can reach what listens there."""
    if endpoint.startswith(UNIX_PREFIX):
        return True
    host, _ = split_host_port(endpoint)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_path(endpoint: str) -> None:
    path = endpoint.removeprefix(UNIX_PREFIX)
    if not path.startswith("/") or not path.isprintable():
        raise DuckConfigError(
            "a unix endpoint must have an absolute path of printable characters, as in "
            f"unix:/run/duck0, got {endpoint!r}"
        )
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise DuckConfigError(
            f"a socket's path must have at most {MAX_SOCKET_PATH_BYTES} bytes, got "
            f"{num_bytes} in {endpoint!r}; choose a shorter directory with --listen, "
            "--listen-dir or TMPDIR"
        )


def _without_brackets(host: str) -> str:
    """What the brackets hold; empty without them."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else ""


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
