"""One remote duck over gRPC: a channel with one Forward stream.

Invariants, pinned by tests:
- replies find their request by id, in whatever order they come;
- no request is sent before the stream has said that the duck that was described is
  behind it;
- when the stream ends and `recover_s` is 0, every request in flight fails at once, with
  one reason, and the next send() opens another one; a request that misses its deadline
  fails alone, and the stream goes on;
- with `recover_s`, a duck that is lost or late gets another stream, again and again,
  and all requests in flight are sent again under their ids.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from vllm_duck.config import DEFAULT_DEADLINE_S
from vllm_duck.endpoints import join_replicas, replicas_of
from vllm_duck.errors import (
    DuckError,
    DuckProtocolError,
    DuckTimeout,
    DuckUnavailable,
)
from vllm_duck.executor.duck import (
    MoeReply,
    MoeRequest,
    ReplyDtype,
)
from vllm_duck.executor.grpcio.call import ForwardCall
from vllm_duck.executor.grpcio.channel import open_channel, token_metadata
from vllm_duck.executor.grpcio.fan_out import PythonFanOut
from vllm_duck.executor.grpcio.pending import Pending, renewed
from vllm_duck.executor.system.cpus import allowed_cpus, run_on_cpus
from vllm_duck.executor.wire.codec import (
    DecodedReply,
    encode_request,
)
from vllm_duck.executor.wire.errors import error_of_reply
from vllm_duck.executor.wire.recovery import (
    MAX_SENDS,
    RecoveryLog,
    StepLimit,
    Watcher,
    backoff_s,
    gave_up,
)
from vllm_duck.executor.wire.security import ClientSecurity


class StreamEnd(NamedTuple):
    """How a stream ended."""

    reason: DuckError
    # Whether the next one may end otherwise.
    may_resend: bool
    # Whether the right duck was behind it, and so got requests.
    was_proven: bool


def connect(
    endpoints: Sequence[str],
    *,
    identities: Sequence[str],
    deadline_s: float,
    reply_dtype: ReplyDtype,
    security: ClientSecurity,
    recover_s: float,
    watcher: Watcher | None = None,
) -> PythonFanOut:
    """`transports.Connect`: a client for each duck."""
    step_limit = StepLimit()
    ducks = [
        GrpcDuck(
            endpoint,
            deadline_s=deadline_s,
            reply_dtype=reply_dtype,
            security=security,
            identity=identity,
            recover_s=recover_s,
            step_limit=step_limit,
            watcher=watcher,
        )
        for endpoint, identity in zip(endpoints, identities, strict=True)
    ]
    return PythonFanOut(ducks, step_limit)


class GrpcDuck:
    """`duck.Duck` at an endpoint; nothing is connected before the first call.

    The threads that gRPC and this client start run on all cpus. They would inherit the
    caller's affinity, and vLLM pins its worker's main thread to one cpu: they would
    then take turns with the model's own compute.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        reply_dtype: ReplyDtype = "bf16",
        security: ClientSecurity | None = None,
        identity: str | None = None,
        recover_s: float = 0.0,
        step_limit: StepLimit | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """endpoint: of replicas, which stand in for each other, all with | in between.

        identity: who must answer, as identity_of() says it; None: any duck.

        recover_s: how long a lost duck is waited for; 0 fails its calls at once.
        """
        self._replicas = replicas_of(endpoint)
        self._name = join_replicas(self._replicas)
        self._deadline_s = deadline_s
        self._reply_dtype: ReplyDtype = reply_dtype
        self._security = security or ClientSecurity()
        self._recover_s = recover_s
        self._step_limit = step_limit or StepLimit()
        self._log = RecoveryLog(watcher)
        self._request_ids = itertools.count(1)
        self._identity = identity
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # Everything below is guarded by the lock.
        self._pending: dict[int, Pending] = {}
        # The stream, once it is opened, and whether the right duck is behind it.
        self._call: ForwardCall | None = None
        self._is_proven = False
        # That opens and reads the stream.
        self._has_thread = False
        self._end_reason: DuckError | None = None
        # Of a duck that is lost: since when, why, and the streams lost in a row.
        self._lost_at_s: float | None = None
        self._loss = ""
        self._num_losses = 0
        # The replica that is the duck, or is tried next.
        self._active = 0

    @property
    def name(self) -> str:
        return self._name

    def send(self, request: MoeRequest) -> Pending:
        """Send a request and return at once.

        Raises:
            DuckTransportError: the client was closed.
        """
        request_id = next(self._request_ids)
        message = encode_request(
            request, request_id=request_id, reply_dtype=self._reply_dtype
        )
        pending = Pending(self, message, request.hidden.shape, self._reply_dtype)
        with self._lock:
            if self._end_reason is not None:
                raise renewed(self._end_reason)
            if not self._pending and self._lost_at_s is not None:
                # Nobody has looked for it meanwhile.
                self._lost_at_s = None
                self._note_loss(DuckUnavailable(self._loss))
            self._pending[request_id] = pending
            if self._is_proven and self._call is not None:
                self._call.send(message)
            elif not self._has_thread:
                run_on_cpus(self._start_thread, allowed_cpus())
        return pending

    def close(self) -> None:
        """Fail what is in flight, and leave no thread behind."""
        self._closed.set()
        with self._lock:
            self._end_reason = self._end_reason or DuckUnavailable(
                f"duck {self._name}: the client was closed"
            )
            self._fail_all(self._end_reason)
            call = self._call
        if call is not None:
            call.close()

    def limit_s(self, pending: Pending) -> float:
        """When this duck is late with a request, or lost for too long."""
        lost_at_s = self._lost_at_s
        if lost_at_s is None:
            return pending.sent_s + self._deadline_s
        return min(lost_at_s + self._recover_s, self._step_limit.end_s)

    def on_limit(self, pending: Pending) -> None:
        """Break with a duck that is late, or give one up that is lost.

        Raises:
            DuckTimeout: it is late, and lost ducks are not recovered.
        """
        with self._lock:
            now_s = time.monotonic()
            if now_s < self.limit_s(pending) or pending.is_done():
                return
            if not self._recover_s:
                raise self._late()
            if self._lost_at_s is None:
                self._note_loss(self._late())
            else:
                lost_s = now_s - self._lost_at_s
                self._fail_all(gave_up(self._name, lost_s, self._recover_s, self._loss))
            call, self._call, self._is_proven = self._call, None, False
        if call is not None:
            call.break_off(self._late())

    def _start_thread(self) -> None:
        self._has_thread = True
        threading.Thread(
            target=self._keep_stream, name=f"duck-client {self._name}", daemon=True
        ).start()

    def _keep_stream(self) -> None:
        """Read the stream, and open the next one while requests wait for it.

        In a thread and not the caller's, so that a reply is ready when the caller comes
        back from the other lane, with its true round trip, and a dead duck is noticed
        between calls.
        """
        wait_s: float | None = 0.0
        while wait_s is not None and not self._closed.wait(wait_s):
            end = self._read_stream()
            with self._lock:
                wait_s = self._next_wait(end)
                self._has_thread = wait_s is not None

    def _read_stream(self) -> StreamEnd:
        """One stream from beginning to end."""
        try:
            channel = open_channel(self._replicas[self._active], self._security)
        except DuckUnavailable as error:
            return StreamEnd(error, may_resend=True, was_proven=False)
        call = ForwardCall(
            self._name,
            channel,
            identity=self._identity,
            metadata=token_metadata(self._security),
        )
        with self._lock:
            self._call = call
        if self._closed.is_set():
            call.close()
        was_proven = call.is_right_duck()
        if was_proven:
            self._send_pending(call)
        for reply, arrival_ns in call.replies():
            self._deliver(reply, arrival_ns)
        call.close()
        assert call.end_reason is not None
        return StreamEnd(call.end_reason, call.may_resend, was_proven)

    def _send_pending(self, call: ForwardCall) -> None:
        with self._lock:
            if self._call is not call:
                return  # broken off meanwhile
            self._is_proven = True
            for pending in self._pending.values():
                pending.sent_now()
                call.send(pending.message)
            lost_at_s, self._lost_at_s = self._lost_at_s, None
        if lost_at_s is not None:
            self._log.back(self._name, time.monotonic() - lost_at_s)

    def _next_wait(self, end: StreamEnd) -> float | None:
        """Seconds until the next stream is opened; None: no request wants one."""
        self._call, self._is_proven = None, False
        # Each replica is tried once at once.
        self._active = (self._active + 1) % len(self._replicas)
        if not self._recover_s or not end.may_resend or self._end_reason is not None:
            self._fail_all(self._end_reason or end.reason)
        elif end.was_proven:
            self._fail_often_lost(end.reason)
        if not self._pending:
            return None
        self._num_losses += 1
        self._note_loss(end.reason)
        return backoff_s(self._num_losses - len(self._replicas) + 1)

    def _note_loss(self, reason: DuckError) -> None:
        self._loss = str(reason).removeprefix(f"duck {self._name} ")
        if self._lost_at_s is None:
            self._lost_at_s = time.monotonic()
            self._log.lost(self._name, self._loss, self._recover_s)

    def _fail_often_lost(self, reason: DuckError) -> None:
        for request_id, pending in list(self._pending.items()):
            pending.num_losses += 1
            if pending.num_losses >= MAX_SENDS:
                self._pending.pop(request_id).finish(reason)

    def _deliver(self, reply: DecodedReply, arrival_ns: int) -> None:
        with self._lock:
            pending = self._pending.pop(reply.request_id, None)
            self._num_losses = 0
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
                rtt_us=(arrival_ns - pending.sent_ns) // 1000,
            )
        )

    def _fail_all(self, reason: DuckError) -> None:
        orphans = list(self._pending.values())
        self._pending.clear()
        for pending in orphans:
            pending.finish(reason)

    def _late(self) -> DuckTimeout:
        return DuckTimeout(
            f"duck {self._name} did not answer within deadline_s={self._deadline_s}; "
            "raise deadline_s if it is only slow"
        )
