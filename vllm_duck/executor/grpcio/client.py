"""One remote duck over gRPC: a channel with one Forward stream.

Invariants, pinned by tests:
- replies find their request by id, in whatever order they come;
- no request is sent before the stream has said that the duck that was described is
  behind it;
- when the stream ends, every request in flight fails at once, with one reason, and
  so does every later send();
- a request that misses its deadline fails alone; the stream goes on.
"""

import itertools
import math
import threading
import time
from collections.abc import Collection, Iterator
from queue import SimpleQueue

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vllm_duck.config import DEFAULT_DEADLINE_S
from vllm_duck.endpoints import UNIX_PREFIX, check_endpoint
from vllm_duck.errors import DuckError, DuckProtocolError, DuckTimeout, DuckUnavailable
from vllm_duck.executor.duck import (
    DuckInfo,
    MoeReply,
    MoeRequest,
    Partial,
    ReplyDtype,
)
from vllm_duck.executor.system.cpus import allowed_cpus, run_on_cpus
from vllm_duck.executor.wire.addresses import grpc_target
from vllm_duck.executor.wire.codec import (
    DESCRIBE_REQUEST,
    NUMPY_DTYPE,
    DecodedReply,
    decode_info,
    decode_reply,
    encode_request,
)
from vllm_duck.executor.wire.errors import (
    error_of_reply,
    error_of_rpc,
    error_of_status,
)
from vllm_duck.executor.wire.identity import identity_of, mismatch
from vllm_duck.executor.wire.limits import (
    DESCRIBE_METHOD,
    FORWARD_METHOD,
    IDENTITY_METADATA_KEY,
    MAX_MESSAGE_BYTES,
    SERVICE,
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


class GrpcDuck:
    """A duck at an endpoint; nothing is connected before the first call.

    `io_cpus` are the cpus for the threads that gRPC and this client start; by default
    all. Without it they would inherit the caller's affinity, and vLLM pins its worker's
    main thread to one cpu: they would then take turns with the model's own compute.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        reply_dtype: ReplyDtype = "bf16",
        security: ClientSecurity | None = None,
        io_cpus: Collection[int] | None = None,
    ) -> None:
        self._name = check_endpoint(endpoint)
        self._deadline_s = deadline_s
        self._reply_dtype: ReplyDtype = reply_dtype
        self._security = security or ClientSecurity()
        self._io_cpus = io_cpus or allowed_cpus()
        # Of the Forward stream, opened with it.
        self._channel: grpc.Channel | None = None
        self._request_ids = itertools.count(1)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        # One answer: whether the right duck is behind the stream.
        self._proof: SimpleQueue[bool] = SimpleQueue()
        # Of the duck that was described; a stream without that takes any.
        self._identity: str | None = None
        self._lock = threading.Lock()
        # Everything below is guarded by the lock.
        self._pending: dict[int, _Pending] = {}
        self._is_stream_open = False
        self._end_reason: DuckError | None = None

    @property
    def name(self) -> str:
        return self._name

    def describe(self) -> DuckInfo:
        """Ask the duck what it holds.

        Raises:
            DuckTransportError: no duck answers there before the deadline.
        """
        try:
            with self._new_channel() as channel:
                message = channel.unary_unary(DESCRIBE_METHOD)(
                    DESCRIBE_REQUEST,
                    timeout=self._deadline_s,
                    metadata=self._metadata(),
                )
        except grpc.RpcError as error:
            raise error_of_rpc(self._name, error) from error
        info = decode_info(message)
        self._identity = identity_of(info)
        return info

    def health(self) -> str:
        """Ask the standard health service: "SERVING" or "NOT_SERVING".

        Raises:
            DuckTransportError: nothing answers there before the deadline.
        """
        try:
            with self._new_channel() as channel:
                reply = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=SERVICE),
                    timeout=self._deadline_s,
                )
        except grpc.RpcError as error:
            raise error_of_rpc(self._name, error) from error
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    def send(self, request: MoeRequest) -> "_Pending":
        """Send a request and return at once.

        Raises:
            DuckTransportError: the stream has ended; the reason why it did.
        """
        request_id = next(self._request_ids)
        message = encode_request(
            request, request_id=request_id, reply_dtype=self._reply_dtype
        )
        pending = _Pending(
            self._name, self._deadline_s, request.hidden.shape, self._reply_dtype
        )
        with self._lock:
            if self._end_reason is not None:
                raise _renewed(self._end_reason)
            if not self._is_stream_open:
                run_on_cpus(self._open_stream, self._io_cpus)
                self._is_stream_open = True
            self._pending[request_id] = pending
        self._outbox.put(message)
        return pending

    def close(self) -> None:
        """Fail what is in flight, and leave no thread behind."""
        self._end(DuckUnavailable(f"duck {self._name}: the client was closed"))
        self._outbox.put(None)
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _new_channel(self) -> grpc.Channel:
        return run_on_cpus(self._open_channel, self._io_cpus)

    def _open_channel(self) -> grpc.Channel:
        security = self._security
        try:
            target = grpc_target(self._name)
        except OSError as error:
            code = grpc.StatusCode.UNAVAILABLE.value[0]
            raise error_of_status(self._name, code, str(error.strerror)) from error
        options: list[tuple[str, int | str]] = list(_CHANNEL_OPTIONS)
        if not self._name.startswith(UNIX_PREFIX):
            # The name that was asked for, which a certificate must have.
            options.append(("grpc.default_authority", self._name))
        if security.tls_ca is None:
            return grpc.insecure_channel(target, options=options)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=security.tls_ca,
            private_key=security.tls_key,
            certificate_chain=security.tls_cert,
        )
        return grpc.secure_channel(target, credentials, options=options)

    def _open_stream(self) -> None:
        self._channel = self._open_channel()
        # Bytes in, bytes out: both transports have one codec.
        arrivals = self._channel.stream_stream(FORWARD_METHOD)(
            self._messages(), metadata=self._metadata()
        )
        threading.Thread(
            target=self._read_replies,
            args=(arrivals,),
            name=f"duck-client {self._name}",
            daemon=True,
        ).start()

    def _messages(self) -> Iterator[bytes]:
        """What the stream sends: nothing before the duck has proved itself."""
        if self._proof.get():
            yield from iter(self._outbox.get, None)

    def _identity_problem(self, arrivals: grpc.Call) -> str:
        """Wait for the stream's first headers; what is wrong with their identity."""
        if self._identity is None:
            return ""
        headers = dict(arrivals.initial_metadata())
        got = str(headers.get(IDENTITY_METADATA_KEY, ""))
        return "" if got == self._identity else mismatch(self._identity, got)

    def _read_replies(self, arrivals: grpc.Call) -> None:
        """Read until the stream ends; runs in its own thread.

        A thread and not the caller, so that a reply is ready when the caller comes
        back from the other lane, with its true round trip, and a dead duck is noticed
        between calls.
        """
        imposture = self._identity_problem(arrivals)
        # With one, the stream ends without a request: with the duck's own error, if
        # that is why it sent no identity.
        self._proof.put(not imposture)
        try:
            for message in arrivals:
                self._deliver(decode_reply(message), time.perf_counter_ns())
            reason: DuckError = DuckUnavailable(
                f"duck {self._name} ended the stream; it is shutting down"
            )
            if imposture:
                reason = DuckProtocolError(f"duck {self._name} {imposture}")
        except grpc.RpcError as error:
            reason = error_of_rpc(self._name, error)
        except DuckProtocolError as error:
            reason = DuckProtocolError(f"duck {self._name}: {error}")
            arrivals.cancel()
        self._end(reason)

    def _deliver(self, reply: DecodedReply, arrival_ns: int) -> None:
        with self._lock:
            pending = self._pending.pop(reply.request_id, None)
        if pending is None:
            return
        if reply.partial is None:
            pending.finish(error_of_reply(self._name, reply.status, reply.error))
            return
        problem = pending.misfit(reply.partial)
        if problem:
            pending.finish(DuckProtocolError(f"duck {self._name}: {problem}"))
            return
        pending.finish(
            MoeReply(
                partial=reply.partial,
                queue_us=reply.queue_us,
                compute_us=reply.compute_us,
                rtt_us=(arrival_ns - pending.start_ns) // 1000,
            )
        )

    def _end(self, reason: DuckError) -> None:
        with self._lock:
            if self._end_reason is None:
                self._end_reason = reason
            orphans = list(self._pending.values())
            self._pending.clear()
        for pending in orphans:
            pending.finish(reason)

    def _metadata(self) -> list[tuple[str, str]]:
        token = self._security.token
        return [] if token is None else [(TOKEN_METADATA_KEY, TOKEN_PREFIX + token)]


class _Pending:
    """One request in flight."""

    def __init__(
        self,
        name: str,
        deadline_s: float,
        shape: tuple[int, ...],
        reply_dtype: ReplyDtype,
    ) -> None:
        self._name = name
        self._deadline_s = deadline_s
        self._shape = shape
        self._num_bytes = math.prod(shape) * NUMPY_DTYPE[reply_dtype].itemsize
        self._outcome: MoeReply | DuckError | None = None
        self._done = threading.Event()
        self.start_ns = time.perf_counter_ns()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> MoeReply:
        passed_s = (time.perf_counter_ns() - self.start_ns) / 1e9
        if not self._done.wait(max(0.0, self._deadline_s - passed_s)):
            raise DuckTimeout(
                f"duck {self._name} did not answer within deadline_s="
                f"{self._deadline_s}; raise deadline_s if it is only slow"
            )
        if isinstance(self._outcome, MoeReply):
            return self._outcome
        assert self._outcome is not None
        raise _renewed(self._outcome)

    def misfit(self, partial: Partial) -> str:
        """What is wrong with the shape or dtype of a partial sum, if anything is."""
        if (partial.shape, partial.nbytes) == (self._shape, self._num_bytes):
            return ""
        return (
            f"expected a partial sum of shape {list(self._shape)} in "
            f"{self._num_bytes} bytes, got {list(partial.shape)} in {partial.nbytes}"
        )

    def finish(self, outcome: MoeReply | DuckError) -> None:
        """Set the outcome; called once."""
        self._outcome = outcome
        self._done.set()


def _renewed(error: DuckError) -> DuckError:
    """A copy to raise: one error object raised in two threads mixes their traces."""
    copy = type(error)(str(error))
    copy.__cause__ = error.__cause__
    return copy
