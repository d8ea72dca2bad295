"""The one table from gRPC status codes and reply statuses to our errors."""

import grpc

from vllm_duck.errors import (
    DuckError,
    DuckProtocolError,
    DuckShapeError,
    DuckTimeout,
    DuckTransportError,
    DuckUnavailable,
)
from vllm_duck.executor.wire.codec import ReplyStatus

_STATUS_ERRORS: dict[grpc.StatusCode, tuple[type[DuckTransportError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (
        DuckUnavailable,
        "cannot be reached or went away; is it running, and is the endpoint right?",
    ),
    grpc.StatusCode.CANCELLED: (DuckUnavailable, "closed the connection"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        DuckTimeout,
        "did not answer in time; raise deadline_s if it is only slow",
    ),
    grpc.StatusCode.UNIMPLEMENTED: (
        DuckProtocolError,
        "speaks gRPC but is not a duck; check the endpoint",
    ),
    grpc.StatusCode.UNAUTHENTICATED: (
        DuckProtocolError,
        "refused the token; give both sides the same token_file",
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        DuckProtocolError,
        "refused the size or the number of the calls; lower max_num_batched_tokens or "
        "raise the duck's --max-message-mib",
    ),
    grpc.StatusCode.INVALID_ARGUMENT: (DuckProtocolError, "refused a message"),
    grpc.StatusCode.DATA_LOSS: (
        DuckProtocolError,
        "got a damaged message; something on the way changes what it passes on",
    ),
}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
# Of a peer's words. Ours are shorter.
_MAX_WORDS = 1000
# What grpcio says of a connection that TLS has failed, and what would mend it. The
# native stream says the latter itself.
_FAILED_TO_CONNECT = "failed to connect"
_CLOSED_REMEDY = (
    "if the duck has --tls-cert, set tls_ca; if it has --tls-ca, set tls_cert and "
    "tls_key to a certificate of that authority"
)
_TLS_REMEDIES = (
    ("has expired", "renew the duck's --tls-cert"),
    ("Hostname Verification", "the duck's --tls-cert must name its endpoint"),
    ("VERIFY_FAILED", "tls_ca must be the authority of the duck's --tls-cert"),
    (
        "WRONG_VERSION_NUMBER",
        "start the duck with --tls-cert and --tls-key, or leave out tls_ca",
    ),
    ("Unwrap failed", _CLOSED_REMEDY),
    ("security handshaker", "tls_ca must hold a certificate as PEM"),
    ("Socket closed", _CLOSED_REMEDY),
)
_OTHER_STATUS_ERROR = (DuckProtocolError, "did not answer as a duck")

_REPLY_ERRORS: dict[ReplyStatus, type[DuckError]] = {
    ReplyStatus.INVALID_REQUEST: DuckShapeError,
    ReplyStatus.INTERNAL: DuckUnavailable,
}


def error_of_rpc(name: str, error: grpc.RpcError) -> DuckTransportError:
    """Our error for a failed call to the duck `name`."""
    return _error(name, error.code(), error.details())


def error_of_status(name: str, code: int, details: str) -> DuckTransportError:
    """The same, from the status code's number."""
    return _error(name, _CODES.get(code, grpc.StatusCode.UNKNOWN), details)


def error_of_reply(name: str, status: ReplyStatus, reason: str) -> DuckError:
    """Our error for a reply whose status is not OK."""
    kind = _REPLY_ERRORS.get(status, DuckProtocolError)
    return kind(f"duck {name} refused a request ({status.name}): {_shown(reason)}")


def _error(name: str, code: grpc.StatusCode, details: str) -> DuckTransportError:
    kind, meaning = _STATUS_ERRORS.get(code, _OTHER_STATUS_ERROR)
    shown = f"duck {name} {meaning} ({code.name}: {_shown(details)})"
    return kind(f"{shown}{_tls_remedy(details or '')}")


def _tls_remedy(details: str) -> str:
    if not details.startswith(_FAILED_TO_CONNECT):
        return ""
    found = (remedy for symptom, remedy in _TLS_REMEDIES if symptom in details)
    return next((f"; {remedy}" for remedy in found), "")


def _shown(text: str | None) -> str:
    """A peer's words, as they may go to a terminal or a log: one line, no controls."""
    text = (text or "")[:_MAX_WORDS]
    return "".join(c if c.isprintable() else " " for c in text)
