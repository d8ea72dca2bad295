"""Chooses the server of a duck: the native stream's, or grpcio's."""

from typing import Protocol

from vllm_duck.executor.grpcio.server import DuckServer
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.wire.security import ServerSecurity
from vllm_duck.executor.wire.transport import Transport, choose_transport


class AnyServer(Protocol):
    """Serves one shard until it is stopped."""

    endpoint: str

    def start(self) -> None: ...

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, answer what has arrived, and close within `grace_s`."""
        ...


def make_server(
    moe: ShardMoe,
    *,
    listen: str,
    security: ServerSecurity,
    max_message_bytes: int,
    transport: Transport,
) -> tuple[AnyServer, str]:
    """A server that listens but does not serve yet, and what carries its calls.

    Raises:
        DuckConfigError: it cannot listen there, or the transport cannot be had.
    """
    choice = choose_transport(transport, has_tls=security.tls_cert is not None)
    if not choice.is_native:
        server = DuckServer(
            moe,
            moe.info,
            listen=listen,
            security=security,
            max_message_bytes=max_message_bytes,
        )
        return server, choice.reason
    # Only here: the build may be without it.
    from vllm_duck.executor.native.server import NativeDuckServer

    native = NativeDuckServer(
        moe.native_compute(),
        moe.info,
        listen=listen,
        security=security,
        max_message_bytes=max_message_bytes,
    )
    return native, choice.reason
