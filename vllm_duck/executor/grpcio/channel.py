"""Channels of grpcio to ducks, with their options."""

import grpc

from vllm_duck.endpoints import UNIX_PREFIX
from vllm_duck.executor.wire.addresses import grpc_target
from vllm_duck.executor.wire.errors import error_of_status
from vllm_duck.executor.wire.limits import (
    MAX_MESSAGE_BYTES,
    TOKEN_METADATA_KEY,
    TOKEN_PREFIX,
)
from vllm_duck.executor.wire.security import ClientSecurity

_CHANNEL_OPTIONS = [
    # The defaults of 4 MiB do not hold a prefill chunk.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Otherwise two clients of one process share a connection, and one's prefill chunk
    # delays the other's decode step.
    ("grpc.use_local_subchannel_pool", 1),
    # The step that waits wants to know now; trying again is the fleet's decision.
    ("grpc.enable_retries", 0),
    # A duck whose machine lost its power sends no FIN; pings find that out.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The default grows to two minutes; a duck that is back is wanted at once.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Ducks are on the local network: a proxy from the environment is never meant.
    ("grpc.enable_http_proxy", 0),
]


def open_channel(endpoint: str, security: ClientSecurity) -> grpc.Channel:
    """A channel that connects when it is first used; looks the name up now.

    Files of TLS are read now too: those of a lost duck, or this host's, may have been
    renewed before it is looked for.

    Raises:
        DuckUnavailable: nobody knows the name.
    """
    try:
        target = grpc_target(endpoint)
    except OSError as error:
        code = grpc.StatusCode.UNAVAILABLE.value[0]
        raise error_of_status(endpoint, code, str(error.strerror)) from error
    options: list[tuple[str, int | str]] = list(_CHANNEL_OPTIONS)
    if not endpoint.startswith(UNIX_PREFIX):
        # The name that was asked for, which a certificate must have.
        options.append(("grpc.default_authority", endpoint))
    if security.tls_ca is None:
        return grpc.insecure_channel(target, options=options)
    security = security.read_again()
    credentials = grpc.ssl_channel_credentials(
        root_certificates=security.tls_ca,
        private_key=security.tls_key,
        certificate_chain=security.tls_cert,
    )
    return grpc.secure_channel(target, credentials, options=options)


def token_metadata(security: ClientSecurity) -> list[tuple[str, str]]:
    """What a call says of the shared secret."""
    token = security.token
    return [] if token is None else [(TOKEN_METADATA_KEY, TOKEN_PREFIX + token)]
