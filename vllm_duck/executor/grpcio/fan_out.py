"""One request to several ducks in Python, each through its own client.

Invariant, pinned by tests: the sum is in float32 and in duck order, so it does not
depend on arrival order.
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_duck.executor.duck import (
    BF16,
    CallTimes,
    Duck,
    DuckStatistics,
    InFlight,
    MoeReply,
    MoeRequest,
    MoeSum,
)
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.recovery import StepLimit

# Calls that the medians of the statistics look back on.
_STATISTICS_WINDOW = 4096


class PythonFanOut:
    """`duck.FanOut`: calls every duck through its own client, and closes them."""

    def __init__(
        self, ducks: Sequence[Duck], step_limit: StepLimit | None = None
    ) -> None:
        """step_limit: the one that the ducks look at."""
        self._ducks = tuple(ducks)
        self._step_limit = step_limit or StepLimit()
        self._logs = tuple(_CallLog(duck.name) for duck in ducks)

    def send(self, request: MoeRequest) -> "_PendingSum":
        return _PendingSum([duck.send(request) for duck in self._ducks], self._logs)

    def statistics(self) -> list[DuckStatistics]:
        return [log.summary() for log in self._logs]

    def begin_step(self, limit_s: float) -> None:
        self._step_limit.end_s = time.monotonic() + limit_s

    def close(self) -> None:
        for duck in self._ducks:
            duck.close()


class _PendingSum:
    """One request in flight at all ducks."""

    def __init__(
        self, calls: list[InFlight[MoeReply]], logs: tuple["_CallLog", ...]
    ) -> None:
        self._calls = calls
        self._logs = logs
        self._replies: list[MoeReply] = []
        self._sent_ns = time.perf_counter_ns()

    def is_done(self) -> bool:
        return all(call.is_done() for call in self._calls)

    def wait(self) -> MoeSum:
        replies = self._wait_for_each()
        times = CallTimes(
            self._sent_ns,
            max(r.rtt_us for r in replies),
            max(r.compute_us for r in replies),
            max(r.rtt_us - r.compute_us - r.queue_us for r in replies),
        )
        return MoeSum(_sum(replies), times)

    def _wait_for_each(self) -> list[MoeReply]:
        if not self._replies:
            self._replies = [call.wait() for call in self._calls]
            for log, reply in zip(self._logs, self._replies, strict=True):
                log.add(reply)
        return self._replies


def _sum(replies: Sequence[MoeReply]) -> npt.NDArray[np.float32]:
    first, *others = replies
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
        return DuckStatistics.of(self._name, self._num_calls, latest)


def _partial_f32(reply: MoeReply) -> npt.NDArray[np.float32]:
    partial = reply.partial
    if partial.dtype == np.uint16:
        return bf16_to_f32(partial.view(np.uint16))
    return partial.view(np.float32)
