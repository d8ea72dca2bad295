"""An endpoint's addresses in the form that grpcio takes.

Host names are looked up here, as the native stream and every other program of the
system look them up. grpcio's own resolver asks DNS alone: it does not know the names
that mDNS or another module of nsswitch.conf gives.
"""

import contextlib
import errno
import socket
from typing import Any
from urllib.parse import quote

from vllm_duck.endpoints import UNIX_PREFIX, split_host_port


def grpc_target(endpoint: str) -> str:
    """What a channel connects to: all addresses of a name, in the system's order.

    Raises:
        OSError: nobody knows the name.
    """
    if endpoint.startswith(UNIX_PREFIX):
        return unix_target(endpoint)
    host, port = split_host_port(endpoint)
    addresses = [address[0] for _, address in _lookup(host)]
    if all(":" not in address for address in addresses):
        return "ipv4:" + ",".join(f"{address}:{port}" for address in addresses)
    # A target has one family. IPv4 has a place among the IPv6 addresses.
    mapped = [each if ":" in each else f"::ffff:{each}" for each in addresses]
    return "ipv6:" + ",".join(f"[{quote(each, safe=':')}]:{port}" for each in mapped)


def unix_target(endpoint: str) -> str:
    return UNIX_PREFIX + quote(endpoint.removeprefix(UNIX_PREFIX))


def local_addresses(host: str) -> list[str]:
    """The numeric addresses of a host name that this machine can listen on.

    Raises:
        OSError: nobody knows the name, or it is of another machine.
    """
    found, problem = [], OSError(errno.EADDRNOTAVAIL, "no address of this machine")
    for family, address in _lookup(host):
        # localhost may name ::1 where IPv6 is off.
        with contextlib.ExitStack() as probes:
            try:
                probe = probes.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.bind((address[0], 0, *address[2:]))
            except OSError as error:
                problem = error
                continue
        found.append(address[0])
    if not found:
        raise problem
    return found


def _lookup(host: str) -> list[tuple[socket.AddressFamily, Any]]:
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in entries]
