"""One Forward call of grpcio's client: its channel, what it sends, what comes."""

import time
from collections.abc import Iterator
from queue import SimpleQueue

import grpc

from vllm_duck.errors import DuckError, DuckProtocolError, DuckUnavailable
from vllm_duck.executor.wire.codec import DecodedReply, decode_reply
from vllm_duck.executor.wire.errors import error_of_rpc
from vllm_duck.executor.wire.identity import mismatch
from vllm_duck.executor.wire.limits import FORWARD_METHOD, IDENTITY_METADATA_KEY

# After these, the duck may be back on the next connection.
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DATA_LOSS,
)


class ForwardCall:
    """A call that lives until its connection breaks; sends nothing before its proof."""

    def __init__(
        self,
        name: str,
        channel: grpc.Channel,
        *,
        identity: str | None,
        metadata: list[tuple[str, str]],
    ) -> None:
        """identity: who must answer; None takes any duck."""
        self._name = name
        self._channel = channel
        self._identity = identity
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        # One answer: whether the right duck is behind the stream.
        self._proof: SimpleQueue[bool] = SimpleQueue()
        # Bytes in, bytes out: both transports have one codec.
        self._arrivals = channel.stream_stream(FORWARD_METHOD)(
            self._messages(), metadata=metadata
        )
        self._imposture = ""
        self._is_proven = False
        self.end_reason: DuckError | None = None
        # Whether another connection may end otherwise.
        self.may_resend = True

    def send(self, message: bytes) -> None:
        self._outbox.put(message)

    def is_right_duck(self) -> bool:
        """Wait for the stream's first headers, and let the messages go if they fit."""
        self._imposture = self._identity_problem()
        self._is_proven = self._identity is not None and not self._imposture
        self._proof.put(not self._imposture)
        return not self._imposture

    def replies(self) -> Iterator[tuple[DecodedReply, int]]:
        """Replies and when each came (`time.perf_counter_ns`), until the call ends."""
        try:
            for message in self._arrivals:
                yield decode_reply(message), time.perf_counter_ns()
            reason: DuckError = DuckUnavailable(
                f"duck {self._name} ended the stream; it is shutting down"
            )
            if self._imposture:
                # It gets no request, and so it ends, unless with an error of its own.
                self.may_resend = False
                reason = DuckProtocolError(f"duck {self._name} {self._imposture}")
        except grpc.RpcError as error:
            # The right duck refuses nothing of a request that was sound when it left.
            self.may_resend = self._is_proven or error.code() in _PASSING
            reason = error_of_rpc(self._name, error)
        except DuckProtocolError as error:
            reason = DuckProtocolError(f"duck {self._name}: {error}")
            self._arrivals.cancel()
        self.end_reason = self.end_reason or reason

    def break_off(self, reason: DuckError) -> None:
        """End it from here, for this reason."""
        self.end_reason = self.end_reason or reason
        self._arrivals.cancel()

    def close(self) -> None:
        self._outbox.put(None)
        self._channel.close()

    def _messages(self) -> Iterator[bytes]:
        """What the stream sends: nothing before the duck has proved itself."""
        if self._proof.get():
            yield from iter(self._outbox.get, None)

    def _identity_problem(self) -> str:
        if self._identity is None:
            return ""
        headers = dict(self._arrivals.initial_metadata())
        got = str(headers.get(IDENTITY_METADATA_KEY, ""))
        return "" if got == self._identity else mismatch(self._identity, got)
