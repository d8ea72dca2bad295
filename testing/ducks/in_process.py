"""A duck that is a Python function of this process."""

import time

from vllm_duck.errors import DuckUnavailable
from vllm_duck.executor.duck import (
    DuckInfo,
    InFlight,
    MoeFunction,
    MoeReply,
    MoeRequest,
    ReplyDtype,
)


class InProcessDuck:
    """Computes in send(); its reply is ready at once."""

    def __init__(
        self,
        function: MoeFunction,
        info: DuckInfo,
        *,
        name: str = "in-process",
        reply_dtype: ReplyDtype = "fp32",
    ) -> None:
        self._function = function
        self._info = info
        self._name = name
        self._reply_dtype: ReplyDtype = reply_dtype
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._name

    def describe(self) -> DuckInfo:
        return self._info

    def send(self, request: MoeRequest) -> InFlight[MoeReply]:
        if self._is_closed:
            raise DuckUnavailable(f"duck {self._name}: the client was closed")
        start_ns = time.perf_counter_ns()
        partial = self._function(request, self._reply_dtype)
        compute_us = (time.perf_counter_ns() - start_ns) // 1000
        return _Ready(
            MoeReply(
                partial=partial,
                queue_us=0,
                compute_us=compute_us,
                rtt_us=compute_us,
            )
        )

    def close(self) -> None:
        self._is_closed = True


class _Ready:
    def __init__(self, reply: MoeReply) -> None:
        self._reply = reply

    def is_done(self) -> bool:
        return True

    def wait(self) -> MoeReply:
        return self._reply
