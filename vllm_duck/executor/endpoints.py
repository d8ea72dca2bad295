"""What an endpoint may look like, and which of them stay on this machine."""

import ipaddress

from vllm_duck.errors import DuckConfigError

UNIX_PREFIX = "unix:"


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint if it is `unix:/path` or `host:port`.

    Raises:
        DuckConfigError: it is neither.
    """
    if endpoint.startswith(UNIX_PREFIX):
        if not endpoint.removeprefix(UNIX_PREFIX).startswith("/"):
            raise DuckConfigError(
                f"a unix endpoint must have an absolute path, as in unix:/run/duck0, "
                f"got {endpoint!r}"
            )
        return endpoint
    host, separator, port = endpoint.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) <= 65535
    if not separator or not host or "/" in host or not is_port:
        raise DuckConfigError(
            f"an endpoint must be host:port or unix:/path, got {endpoint!r}; correct "
            "it in duck.endpoints, VLLM_DUCK_ENDPOINTS or --listen"
        )
    return endpoint


def is_local(endpoint: str) -> bool:
    """Whether only processes of this machine can reach what listens there."""
    if endpoint.startswith(UNIX_PREFIX):
        return True
    host = endpoint.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
