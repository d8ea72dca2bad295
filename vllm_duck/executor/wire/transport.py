"""Which code carries the calls: the native stream, or grpcio. The wire is the same.

Both speak gRPC and `duck.proto`, so either may be at each end.
"""

import importlib
from typing import Literal, NamedTuple

from vllm_duck.errors import DuckConfigError

Transport = Literal["auto", "native", "grpcio"]
TRANSPORTS: tuple[Transport, ...] = ("auto", "native", "grpcio")


class TransportChoice(NamedTuple):
    """What carries the calls, and one clause for the log that says so."""

    is_native: bool
    reason: str


def choose_transport(wanted: Transport, *, has_tls: bool) -> TransportChoice:
    """Take the native stream where it can serve.

    Raises:
        DuckConfigError: "native" is asked for and cannot be had.
    """
    obstacle = _obstacle(has_tls=has_tls)
    if wanted == "grpcio":
        return TransportChoice(False, "grpcio, as asked for")
    if obstacle is None:
        return TransportChoice(True, "the native stream")
    if wanted == "native":
        raise DuckConfigError(
            f"the native stream was asked for, but {obstacle}; ask for transport "
            '"auto" or "grpcio"'
        )
    return TransportChoice(False, f"grpcio, since {obstacle}")


def _obstacle(*, has_tls: bool) -> str | None:
    if has_tls:
        return "TLS is on, which the native stream does not speak"
    return _missing_stream()


def _missing_stream() -> str | None:
    try:
        importlib.import_module("vllm_duck.executor._stream")
    except ModuleNotFoundError:
        return "this build is without it (libnghttp2-dev was not installed)"
    except ImportError as error:
        return f"it cannot be loaded ({error})"
    return None
