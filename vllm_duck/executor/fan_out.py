"""One request to several ducks in Python: encoded once, summed in duck order.

Invariants, pinned by tests:
- the sum is in float32 and in duck order, so it does not depend on arrival order;
- a request is encoded once, whatever the number of ducks.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_duck.executor.bf16 import bf16_to_f32
from vllm_duck.executor.codec import encode_request
from vllm_duck.executor.duck import (
    BF16,
    CallTimes,
    Duck,
    MoeReply,
    MoeRequest,
    PendingReply,
    ReplyDtype,
    WireDuck,
)

# Calls that the medians of the statistics look back on.
_STATISTICS_WINDOW = 4096


@dataclass(frozen=True)
class DuckStatistics:
    """How one duck did: medians over its latest calls, microseconds."""

    name: str
    num_calls: int
    rtt_us: float
    compute_us: float
    queue_us: float


class PendingSum(Protocol):
    """One request in flight at all ducks."""

    def is_done(self) -> bool:
        """Whether result() would return or raise at once."""
        ...

    def replies(self) -> list[MoeReply]:
        """Wait for all ducks; their replies in duck order.

        Raises:
            DuckTransportError: a duck failed.
        """
        ...

    def times(self) -> CallTimes:
        """Wait for all ducks; how long they took."""
        ...

    def result(self) -> npt.NDArray[np.float32]:
        """Wait for all ducks; the sum of their partials [T, H], fresh and writable.

        Raises:
            DuckTransportError: a duck failed.
        """
        ...


class FanOut(Protocol):
    """All ducks as one executor: this module's, or the native stream's."""

    def start(self, request: MoeRequest) -> PendingSum: ...

    def statistics(self) -> list[DuckStatistics]: ...

    def close(self) -> None: ...


class PythonFanOut:
    """Calls every duck through its own client."""

    def __init__(self, ducks: Sequence[Duck], *, reply_dtype: ReplyDtype) -> None:
        self._ducks = tuple(ducks)
        self._reply_dtype: ReplyDtype = reply_dtype
        self._request_ids = itertools.count(1)
        # Asked once: isinstance() of a protocol takes 50 us.
        self._wire_ducks = tuple(
            duck if isinstance(duck, WireDuck) else None for duck in ducks
        )
        self._logs = tuple(_CallLog(duck.name) for duck in ducks)

    def start(self, request: MoeRequest) -> "PythonPendingSum":
        """Send one request to all ducks and return at once; several may be in flight.

        Raises:
            DuckTransportError: a duck is gone.
        """
        if not any(self._wire_ducks):
            return PythonPendingSum([d.start(request) for d in self._ducks], self._logs)
        encoded = encode_request(
            request,
            request_id=next(self._request_ids),
            reply_dtype=self._reply_dtype,
        )
        pendings = [
            duck.start(request) if wire is None else wire.start_encoded(encoded)
            for duck, wire in zip(self._ducks, self._wire_ducks, strict=True)
        ]
        return PythonPendingSum(pendings, self._logs)

    def statistics(self) -> list[DuckStatistics]:
        """How each duck did, in duck order."""
        return [log.summary() for log in self._logs]

    def close(self) -> None:
        """The ducks are closed by their owner."""


def summary(
    name: str, num_calls: int, latest: npt.NDArray[np.uint32]
) -> DuckStatistics:
    """Medians of the latest calls [N, 3]: rtt_us, compute_us, queue_us."""
    medians = np.median(latest, axis=0) if len(latest) else np.zeros(3)
    rtt_us, compute_us, queue_us = (float(median) for median in medians)
    return DuckStatistics(
        name=name,
        num_calls=num_calls,
        rtt_us=rtt_us,
        compute_us=compute_us,
        queue_us=queue_us,
    )


class PythonPendingSum:
    """One request in flight at all ducks."""

    __slots__ = ("_logs", "_pendings", "_replies", "_sent_ns")

    def __init__(
        self, pendings: list[PendingReply], logs: tuple["_CallLog", ...]
    ) -> None:
        self._pendings = pendings
        self._logs = logs
        self._replies: list[MoeReply] | None = None
        self._sent_ns = time.perf_counter_ns()

    def is_done(self) -> bool:
        """Whether result() would return or raise at once."""
        return all(pending.is_done() for pending in self._pendings)

    def replies(self) -> list[MoeReply]:
        """Wait for all ducks; their replies in duck order.

        Raises:
            DuckTransportError: the first duck in order that failed.
        """
        if self._replies is None:
            self._replies = [pending.result() for pending in self._pendings]
            for log, reply in zip(self._logs, self._replies, strict=True):
                log.add(reply)
        return self._replies

    def times(self) -> CallTimes:
        """Wait for all ducks; how long they took."""
        replies = self.replies()
        return CallTimes(
            self._sent_ns,
            max(r.rtt_us for r in replies),
            max(r.compute_us for r in replies),
            max(r.rtt_us - r.compute_us - r.queue_us for r in replies),
        )

    def result(self) -> npt.NDArray[np.float32]:
        """Wait for all ducks; the sum of their partials [T, H], fresh and writable.

        Raises:
            DuckTransportError: the first duck in order that failed.
        """
        first, *others = self.replies()
        total = _partial_f32(first)
        # Widening has made an array of our own; a float32 one may be the duck's.
        if first.partial.dtype != BF16:
            total = total.copy()
        for reply in others:
            total += _partial_f32(reply)
        return total


class _CallLog:
    """The latest calls of one duck."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_calls = 0
        self._latest: deque[tuple[int, int, int]] = deque(maxlen=_STATISTICS_WINDOW)

    def add(self, reply: MoeReply) -> None:
        self._num_calls += 1
        self._latest.append((reply.rtt_us, reply.compute_us, reply.queue_us))

    def summary(self) -> DuckStatistics:
        # From any thread: list() copies at once, numpy would iterate while others add.
        latest = np.array(list(self._latest), np.uint32)
        return summary(self._name, self._num_calls, latest)


def _partial_f32(reply: MoeReply) -> npt.NDArray[np.float32]:
    partial = reply.partial
    if partial.dtype == np.uint16:
        return bf16_to_f32(partial.view(np.uint16))
    return partial.view(np.float32)
