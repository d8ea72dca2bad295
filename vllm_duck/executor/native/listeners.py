"""Listening sockets for an endpoint, as the native stream wants them."""

import contextlib
import errno
import socket
from contextlib import ExitStack
from pathlib import Path

from vllm_duck.endpoints import UNIX_PREFIX, split_host_port
from vllm_duck.errors import DuckConfigError

_BACKLOG = 128


def open_listeners(listen: str) -> tuple[list[socket.socket], str]:
    """Listen on every address of an endpoint; port 0 becomes one the system chose.

    Returns the non-blocking sockets and the endpoint that callers use.

    Raises:
        DuckConfigError: the port is taken, or the address is not of this machine.
    """
    try:
        if listen.startswith(UNIX_PREFIX):
            return [_listen_unix(listen.removeprefix(UNIX_PREFIX))], listen
        return _listen_tcp(listen)
    except OSError as error:
        raise DuckConfigError(
            f"cannot listen on {listen}: {error.strerror}; {_hint(listen, error)}"
        ) from error


def _hint(listen: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "does another process listen there?"
    if not listen.startswith(UNIX_PREFIX):
        return "is it an address of this machine, and a port that this user may take?"
    if error.errno == errno.ENOENT:
        return "is the directory missing?"
    # NFS, FUSE and the like, also as TMPDIR, where local ducks have theirs.
    return "name a directory of this user on a file system that has sockets"


def _listen_tcp(listen: str) -> tuple[list[socket.socket], str]:
    host, port = split_host_port(listen)
    # A name such as localhost has several addresses.
    addresses = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets = []
    with ExitStack() as undo:
        for family, _, _, _, address in addresses:
            listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # A wildcard takes IPv4 too; a name's IPv4 address has its own socket.
                is_alone = len(addresses) == 1
                listener.setsockopt(
                    socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_alone
                )
            try:
                listener.bind((address[0], port, *address[2:]))
            except OSError as error:
                # localhost may name ::1 where IPv6 is off.
                if error.errno == errno.EADDRNOTAVAIL and len(addresses) > 1:
                    continue
                raise
            port = listener.getsockname()[1]
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            sockets.append(listener)
        undo.pop_all()
    return sockets, f"{listen.rpartition(':')[0]}:{port}"


def _listen_unix(path: str) -> socket.socket:
    """Listen on a socket that only this user may open."""
    _remove_stale(path)
    with ExitStack() as undo:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.enter_context(listener)
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        undo.pop_all()
    return listener


def _remove_stale(path: str) -> None:
    """A duck that was killed leaves its socket; one that lives answers on it."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
