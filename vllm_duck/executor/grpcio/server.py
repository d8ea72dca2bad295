"""The gRPC server of one duck: Describe, Forward, health and reflection."""

import hmac
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from vllm_duck.endpoints import (
    UNIX_PREFIX,
    join_host_port,
    remove_socket,
    split_host_port,
)
from vllm_duck.errors import DuckConfigError, DuckProtocolError
from vllm_duck.executor.duck import DuckInfo, MoeFunction, ServedShard
from vllm_duck.executor.grpcio.forward_stream import ForwardStream, OneAtATime
from vllm_duck.executor.system.process import resident_bytes
from vllm_duck.executor.wire.addresses import local_addresses, unix_target
from vllm_duck.executor.wire.codec import ChecksumError, encode_info
from vllm_duck.executor.wire.identity import identity_of
from vllm_duck.executor.wire.limits import (
    IDENTITY_METADATA_KEY,
    MAX_CONCURRENT_CALLS,
    MAX_MESSAGE_BYTES,
    SERVICE,
    TOKEN_METADATA_KEY,
    TOKEN_PREFIX,
)
from vllm_duck.executor.wire.security import ServerSecurity

logger = logging.getLogger(__name__)

# grpcio never counts a reflection call whose message does not parse as ended.
_STOP_MARGIN_S = 1.0

_HEALTH_PREFIX = f"/{health.SERVICE_NAME}/"


def make_server(
    moe: ServedShard, *, listen: str, security: ServerSecurity, max_message_bytes: int
) -> "DuckServer":
    """`transports.MakeServer`."""
    return DuckServer(
        moe,
        moe.info,
        listen=listen,
        security=security,
        max_message_bytes=max_message_bytes,
    )


class DuckServer:
    """Serves one shard until it is stopped.

    `function` computes the shard's partial sums, one call at a time.
    """

    def __init__(
        self,
        function: MoeFunction,
        info: DuckInfo,
        *,
        listen: str,
        security: ServerSecurity | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        security = security or ServerSecurity()
        security.check_listen(listen)
        self._info = info
        self._kernel = OneAtATime(function)
        self._streams: set[ForwardStream] = set()
        self._streams_lock = threading.Lock()
        self._is_stopping = False
        self._health = health.HealthServicer()
        self._server = grpc.server(
            # One above the limit, so that a refusal needs no free thread.
            futures.ThreadPoolExecutor(MAX_CONCURRENT_CALLS + 1, "duck-call"),
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
            interceptors=_interceptors(security),
            options=_server_options(max_message_bytes),
        )
        self._add_services()
        self.endpoint = _bind(self._server, listen, security)

    def start(self) -> None:
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, answer what has arrived, and close within `grace_s`."""
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        with self._streams_lock:
            self._is_stopping = True
            streams = list(self._streams)
        for stream in streams:
            stream.drain()
        self._server.stop(grace_s).wait(grace_s + _STOP_MARGIN_S)
        remove_socket(self.endpoint)

    def _describe(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return encode_info(replace(self._info, resident_bytes=resident_bytes()))

    def _forward(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        stream = ForwardStream(messages, self._kernel)
        with self._streams_lock:
            if self._is_stopping:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the duck is shutting down")
            self._streams.add(stream)
        # At once, for the host waits for it.
        identity = identity_of(self._info)
        context.send_initial_metadata(((IDENTITY_METADATA_KEY, identity),))
        try:
            yield from stream
        except ChecksumError as error:
            context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        except DuckProtocolError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            with self._streams_lock:
                self._streams.discard(stream)

    def _add_services(self) -> None:
        # Bytes in, bytes out: the codec is ours, gRPC does not see the messages.
        handlers = {
            "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
            "Forward": grpc.stream_stream_rpc_method_handler(self._forward),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def _set_health(self, status: int) -> None:
        for service in ("", SERVICE):
            self._health.set(service, status)


class _TokenInterceptor(grpc.ServerInterceptor):
    """Lets only calls with the shared token through; health stays open for probes."""

    def __init__(self, token: str) -> None:
        self._expected = (TOKEN_PREFIX + token).encode()
        # For calls of every kind: it waits for no message.
        self._refuse = grpc.stream_stream_rpc_method_handler(_refuse_token)

    def intercept_service(
        self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails
    ) -> Any:
        if details.method.startswith(_HEALTH_PREFIX):
            return continuation(details)
        got = dict(details.invocation_metadata).get(TOKEN_METADATA_KEY, "")
        if hmac.compare_digest(str(got).encode(), self._expected):
            return continuation(details)
        return self._refuse


def _refuse_token(
    messages: Iterator[bytes], context: grpc.ServicerContext
) -> Iterator[bytes]:
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "the duck's token is missing or wrong"
    )
    raise AssertionError("abort raises")


def _interceptors(security: ServerSecurity) -> tuple[_TokenInterceptor, ...]:
    return () if security.token is None else (_TokenInterceptor(security.token),)


def _server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        # The default of 4 MiB does not hold a prefill chunk.
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Two ducks on one port would each get half of the host's connections.
        ("grpc.so_reuseport", 0),
        # A host may ping an idle connection to see whether the duck still lives.
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _bind(server: grpc.Server, listen: str, security: ServerSecurity) -> str:
    """Listen on every address of an endpoint; port 0 becomes one the system chose."""
    add_port = server.add_insecure_port
    if security.tls_cert is not None:
        credentials = grpc.ssl_server_credentials(
            [(security.tls_key, security.tls_cert)],
            root_certificates=security.tls_ca,
            require_client_auth=security.tls_ca is not None,
        )
        add_port = partial(server.add_secure_port, server_credentials=credentials)
    try:
        if listen.startswith(UNIX_PREFIX):
            add_port(unix_target(listen))
            Path(listen.removeprefix(UNIX_PREFIX)).chmod(0o600)
            return listen
        host, port = split_host_port(listen)
        for address in local_addresses(host):
            port = add_port(join_host_port(address, port))
    except (RuntimeError, OSError) as error:
        raise DuckConfigError(
            f"cannot listen on {listen} (is the port taken, the directory missing, or "
            f"the certificate not a PEM?): {error}"
        ) from error
    return f"{listen.rpartition(':')[0]}:{port}"
