"""All ducks over the native stream: C++ sends, waits and sums, without the GIL.

There is no thread behind it: whoever waits for a result drives the sockets of all
ducks. A connection that breaks is replaced and what was in flight is sent again, for as
long as `recover_s` says; see csrc/stream/client/link.h.
"""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_duck.endpoints import join_replicas, replicas_of
from vllm_duck.errors import (
    DuckError,
    DuckProtocolError,
    DuckTimeout,
    DuckUnavailable,
)
from vllm_duck.executor import _stream
from vllm_duck.executor.duck import (
    CallTimes,
    DuckStatistics,
    MoeRequest,
    MoeSum,
    ReplyDtype,
)
from vllm_duck.executor.native.tls import client_tls, log_stale_files
from vllm_duck.executor.wire.codec import ReplyStatus
from vllm_duck.executor.wire.errors import error_of_reply, error_of_status
from vllm_duck.executor.wire.identity import mismatch
from vllm_duck.executor.wire.limits import MAX_MESSAGE_BYTES, TOKEN_PREFIX
from vllm_duck.executor.wire.recovery import RecoveryLog, Watcher, gave_up
from vllm_duck.executor.wire.security import ClientSecurity

# As grpcio's client in client.py; a duck's machine that lost its power sends no FIN.
QUIET_S = 10.0

# Block::kSmallestKept of csrc/base/block.h, in float32.
_LARGE_SUM = (64 << 10) // 4

# Failure::Kind of csrc/stream/ticket.h.
_STATUS, _REFUSED, _TIMEOUT, _PROTOCOL, _CLOSED, _IDENTITY = range(6)
_GAVE_UP, _LOST, _BACK, _STALE_TLS = range(6, 10)


class NativeFanOut:
    """`duck.FanOut`: one request to all ducks at once; connects at the first one."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        identities: Sequence[str],
        deadline_s: float,
        reply_dtype: ReplyDtype,
        security: ClientSecurity,
        recover_s: float = 0.0,
        quiet_s: float = QUIET_S,
        watcher: Watcher | None = None,
    ) -> None:
        """endpoints: one a duck; of replicas, which stand in for each other, with |.

        identities: who must answer at each endpoint, as identity_of() says it.

        recover_s: how long a lost duck is waited for; with 0 its requests fail at once.
        quiet_s: how long a duck that owes a reply may be silent before it is pinged;
        after half as long again its connection counts as lost.
        """
        self._names = tuple(join_replicas(replicas_of(each)) for each in endpoints)
        self._identities = tuple(identities)
        self._deadline_s = deadline_s
        self._recover_s = recover_s
        self._log = RecoveryLog(watcher)
        self._reply_dtype: ReplyDtype = reply_dtype
        token = security.token
        self._client = _stream.client_new(
            self._names,
            self._identities,
            "" if token is None else TOKEN_PREFIX + token,
            deadline_s,
            recover_s,
            quiet_s,
            reply_dtype == "fp32",
            client_tls(security),
        )

    def send(self, request: MoeRequest) -> "_PendingSum":
        """Send one request to all ducks and return at once; several may be in flight.

        Raises:
            DuckProtocolError: it is larger than a duck would take, or too many
                requests are in flight.
        """
        num_rows, hidden_size = request.hidden.shape
        num_topk = request.topk_ids.shape[1]
        num_bytes = num_rows * (2 * hidden_size + 8 * num_topk)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise DuckProtocolError(
                f"a request must have at most {MAX_MESSAGE_BYTES} bytes, got "
                f"{num_bytes}; lower max_num_batched_tokens"
            )
        ticket = _stream.client_start(
            self._client,
            request.layer_idx,
            num_rows,
            hidden_size,
            num_topk,
            request.hidden,
            request.topk_ids,
            request.topk_weights,
        )
        if ticket is None:
            raise DuckProtocolError(
                "at most 64 requests may be in flight; ask for results first"
            )
        return _PendingSum(self, ticket, (num_rows, hidden_size))

    def statistics(self) -> list[DuckStatistics]:
        """How each duck did, in duck order."""
        return [
            DuckStatistics.of(
                name, num_calls, np.frombuffer(latest, np.uint32).reshape(-1, 3)
            )
            for name, (num_calls, latest) in zip(
                self._names, _stream.client_statistics(self._client), strict=True
            )
        ]

    def begin_step(self, limit_s: float) -> None:
        _stream.client_begin_step(self._client, limit_s)

    def close(self) -> None:
        _stream.client_close(self._client)

    def await_replies(
        self, ticket: object, out: npt.NDArray[np.float32] | None
    ) -> None:
        """Wait until all ducks have answered; the sum goes to `out`.

        Raises:
            DuckError: of the first duck that failed.
        """
        while (event := _stream.ticket_wait(ticket, out)) is not None:
            duck_idx, kind, code, text = event
            name = self._names[duck_idx]
            if kind == _LOST:
                self._log.lost(name, text, self._recover_s)
            elif kind == _BACK:
                self._log.back(name, code / 1000)
            elif kind == _STALE_TLS:
                log_stale_files(text)
            else:
                raise self.error(duck_idx, kind, code, text)

    def error(self, duck_idx: int, kind: int, code: int, text: str) -> DuckError:
        """Our error for what the stream says of one duck."""
        name = self._names[duck_idx]
        if kind == _STATUS:
            return error_of_status(name, code, text)
        if kind == _REFUSED:
            status = code if code in list(ReplyStatus) else ReplyStatus.UNSPECIFIED
            return error_of_reply(name, ReplyStatus(status), text)
        if kind == _TIMEOUT:
            return DuckTimeout(
                f"duck {name} did not answer within deadline_s={self._deadline_s}; "
                "raise deadline_s if it is only slow"
            )
        if kind == _CLOSED:
            return DuckUnavailable(f"duck {name}: {text}")
        if kind == _GAVE_UP:
            return gave_up(name, code / 1000, self._recover_s, text)
        if kind == _IDENTITY:
            expected = self._identities[duck_idx]
            return DuckProtocolError(f"duck {name} {mismatch(expected, text)}")
        assert kind == _PROTOCOL, kind
        return DuckProtocolError(f"duck {name}: {text}")


class _PendingSum:
    """One request in flight at all ducks."""

    __slots__ = ("_fan_out", "_sent_ns", "_shape", "_ticket")

    def __init__(
        self, fan_out: NativeFanOut, ticket: object, shape: tuple[int, int]
    ) -> None:
        self._fan_out = fan_out
        self._ticket = ticket
        self._shape = shape
        self._sent_ns = time.perf_counter_ns()

    def is_done(self) -> bool:
        return _stream.ticket_is_done(self._ticket)

    def wait(self) -> MoeSum:
        """The sum, and how long the ducks took until this host looked."""
        total = _empty_sum(self._shape)
        self._fan_out.await_replies(self._ticket, total)
        times_us = _stream.ticket_times(self._ticket)
        return MoeSum(total, CallTimes(self._sent_ns, *times_us))


def _empty_sum(shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """An array in memory that the next call takes over when this one is dropped."""
    num_values = shape[0] * shape[1]
    if num_values < _LARGE_SUM:
        return np.empty(shape, np.float32)
    return np.ndarray(shape, np.float32, _stream.sum_memory(4 * num_values))


# `transports.Connect`.
connect = NativeFanOut
