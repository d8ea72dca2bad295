"""The transports: what carries the calls of a host to its ducks, at both ends.

All of them speak gRPC and `duck.proto`, so each end may have another one. A third is an
entry in TRANSPORTS and in `config.TransportName`, and a folder of that name here, whose
client.py has a `connect` and whose server.py has a `make_server`. What `connect` gives
carries requests alone: what a duck holds is asked before, and always through grpcio
(`grpcio/describer.py` says why).
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from vllm_duck.config import TransportName
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.duck import FanOut, ReplyDtype, ServedShard
from vllm_duck.executor.wire.recovery import Watcher
from vllm_duck.executor.wire.security import ClientSecurity, ServerSecurity


class Connect(Protocol):
    """A transport's end at the host."""

    def __call__(
        self,
        endpoints: Sequence[str],
        *,
        identities: Sequence[str],
        deadline_s: float,
        reply_dtype: ReplyDtype,
        security: ClientSecurity,
        recover_s: float,
        watcher: Watcher | None = None,
    ) -> FanOut:
        """Nothing is connected before the first request.

        endpoints: one a duck; of replicas, which stand in for each other, with |.
        identities: who must answer at each endpoint, as identity_of() says it.
        recover_s: how long a lost duck is waited for; 0 fails its requests at once.
        watcher: hears of ducks that are lost, and back.
        """
        ...


class AnyServer(Protocol):
    """Serves one shard until it is stopped."""

    endpoint: str

    def start(self) -> None: ...

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, answer what has arrived, and close within `grace_s`."""
        ...


class MakeServer(Protocol):
    """A transport's end at a duck."""

    def __call__(
        self,
        moe: ServedShard,
        *,
        listen: str,
        security: ServerSecurity,
        max_message_bytes: int,
    ) -> AnyServer:
        """A server that listens but does not serve yet.

        Raises:
            DuckConfigError: it cannot listen there.
        """
        ...


@dataclass(frozen=True)
class Transport:
    """One entry of TRANSPORTS. Its folder is imported when it is used, not before."""

    name: TransportName
    # As the log says it.
    title: str
    # One clause that says why it cannot serve, with TLS or without; None: it can.
    obstacle: Callable[[bool], str | None]

    @property
    def connect(self) -> Connect:
        return self._import("client").connect

    @property
    def make_server(self) -> MakeServer:
        return self._import("server").make_server

    def _import(self, module: str) -> Any:
        return importlib.import_module(f"{__package__}.{self.name}.{module}")


class TransportChoice(NamedTuple):
    """What carries the calls, and one clause for the log that says so."""

    transport: Transport
    reason: str


def choose_transport(wanted: TransportName, *, has_tls: bool) -> TransportChoice:
    """Take the one that is wanted; of "auto" the first that can serve.

    Raises:
        DuckConfigError: it is asked for by its name and cannot be had.
    """
    reason = ""
    for transport in TRANSPORTS:
        is_asked_for = wanted == transport.name
        if not is_asked_for and wanted != "auto":
            continue
        obstacle = transport.obstacle(has_tls)
        if obstacle is None:
            reason = ", as asked for" if is_asked_for else reason
            return TransportChoice(transport, transport.title + reason)
        if is_asked_for:
            others = [each.name for each in TRANSPORTS if each is not transport]
            raise DuckConfigError(
                f"{transport.title} was asked for, but {obstacle}; ask for transport "
                + " or ".join(f'"{name}"' for name in ("auto", *others))
            )
        reason = f", since {obstacle}"
    raise AssertionError("the last transport has no obstacle")


def _native_obstacle(has_tls: bool) -> str | None:
    try:
        stream = importlib.import_module("vllm_duck.executor._stream")
    except ModuleNotFoundError:
        return "this build is without it (libnghttp2-dev was not installed)"
    except ImportError as error:
        return f"it cannot be loaded ({error})"
    if has_tls and not hasattr(stream, "tls_new"):
        return "TLS is on, and it was built without (libssl-dev was not installed)"
    return None


# In the order of preference; the last can always serve.
TRANSPORTS = (
    Transport("native", "the native stream", _native_obstacle),
    Transport("grpcio", "grpcio", lambda has_tls: None),
)
