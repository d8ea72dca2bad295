"""All ducks of a model as one: checked together, called together, summed in order.

Invariants, pinned by tests:
- the sum is in float32 and in duck order, so it does not depend on arrival order;
- a request is encoded once, whatever the number of ducks.
"""

import itertools
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_duck.errors import DuckConfigError, DuckProtocolError, DuckUnavailable
from vllm_duck.executor.bf16 import bf16_to_f32
from vllm_duck.executor.client import DEFAULT_DEADLINE_S, GrpcDuck
from vllm_duck.executor.codec import encode_request
from vllm_duck.executor.duck import (
    PROTOCOL_VERSION,
    REQUANTIZED_FORMATS,
    CallTimes,
    Duck,
    DuckInfo,
    ModelSummary,
    MoeReply,
    MoeRequest,
    PendingReply,
    ReplyDtype,
    WireDuck,
)
from vllm_duck.executor.security import ClientSecurity
from vllm_duck.executor.shards import check_tiling

# Calls that the medians of the statistics look back on.
_STATISTICS_WINDOW = 4096
_CONNECT_POLL_S = 0.2


@dataclass(frozen=True)
class DuckStatistics:
    """How one duck did: medians over its latest calls, microseconds."""

    name: str
    num_calls: int
    rtt_us: float
    compute_us: float
    queue_us: float


class Fleet:
    """The ducks that together hold the model, in duck order."""

    def __init__(
        self, ducks: Sequence[Duck], *, reply_dtype: ReplyDtype = "bf16"
    ) -> None:
        if not ducks:
            raise DuckConfigError("a fleet needs at least one duck; set duck.endpoints")
        self._ducks = tuple(ducks)
        self._reply_dtype: ReplyDtype = reply_dtype
        self._request_ids = itertools.count(1)
        # Asked once: isinstance() of a protocol takes 50 us.
        self._wire_ducks = tuple(
            duck if isinstance(duck, WireDuck) else None for duck in ducks
        )
        self._logs = tuple(_CallLog(duck.name) for duck in ducks)

    @classmethod
    def connect(
        cls,
        endpoints: Sequence[str],
        *,
        expect: ModelSummary | None = None,
        connect_s: float = 0.0,
        deadline_s: float = DEFAULT_DEADLINE_S,
        reply_dtype: ReplyDtype = "bf16",
        security: ClientSecurity | None = None,
        io_cpus: Collection[int] | None = None,
    ) -> "Fleet":
        """Connect to every duck and check that together they are the model.

        connect_s: how long to wait for ducks that are not up yet.

        Raises:
            DuckConfigError: the ducks do not tile the model, or are of another one.
            DuckTransportError: a duck does not answer, or not as a duck.
        """
        with ExitStack() as undo:
            ducks: list[Duck] = []
            for endpoint in endpoints:
                duck = GrpcDuck(
                    endpoint,
                    deadline_s=deadline_s,
                    reply_dtype=reply_dtype,
                    security=security,
                    io_cpus=io_cpus,
                )
                undo.callback(duck.close)
                ducks.append(duck)
            fleet = cls(ducks, reply_dtype=reply_dtype)
            fleet.check(expect, connect_s=connect_s)
            undo.pop_all()
        return fleet

    @property
    def ducks(self) -> tuple[Duck, ...]:
        return self._ducks

    def describe(self, *, connect_s: float = 0.0) -> list[DuckInfo]:
        """Ask every duck, all at once, what it holds; wait for those not up yet.

        Raises:
            DuckTransportError: the first duck in order that does not answer well.
        """
        give_up_s = time.monotonic() + connect_s
        with ThreadPoolExecutor(len(self._ducks), "duck-describe") as pool:
            return list(
                pool.map(lambda duck: _describe_until(duck, give_up_s), self._ducks)
            )

    def check(
        self, expect: ModelSummary | None = None, *, connect_s: float = 0.0
    ) -> list[DuckInfo]:
        """Check that the ducks are of one protocol and model, and tile it exactly.

        Raises:
            DuckProtocolError: a duck of another protocol version.
            DuckConfigError: a duck of another model or another --weight-format than
                the first, a gap or an overlap.
        """
        infos = self.describe(connect_s=connect_s)
        names = [duck.name for duck in self._ducks]
        for name, info in zip(names, infos, strict=True):
            _check_version(name, info)
        if expect is None:
            expect, owner = infos[0].model, f"duck {names[0]}"
        else:
            owner = "this host"
        for name, info in zip(names, infos, strict=True):
            _check_model(name, info.model, expect, owner=owner)
        _check_weight_formats(names, infos)
        check_tiling(
            [info.shard for info in infos],
            [f"duck {name}" for name in names],
            num_columns=expect.moe_intermediate_size,
            num_experts=expect.n_routed_experts,
        )
        return infos

    def start(self, request: MoeRequest) -> "PendingSum":
        """Send one request to all ducks and return at once; several may be in flight.

        Raises:
            DuckTransportError: a duck is gone.
        """
        if not any(self._wire_ducks):
            return PendingSum([d.start(request) for d in self._ducks], self._logs)
        encoded = encode_request(
            request,
            request_id=next(self._request_ids),
            reply_dtype=self._reply_dtype,
        )
        pendings = [
            duck.start(request) if wire is None else wire.start_encoded(encoded)
            for duck, wire in zip(self._ducks, self._wire_ducks, strict=True)
        ]
        return PendingSum(pendings, self._logs)

    def statistics(self) -> list[DuckStatistics]:
        return [log.summary() for log in self._logs]

    def close(self) -> None:
        for duck in self._ducks:
            duck.close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class PendingSum:
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
        first, *others = (_partial_f32(reply) for reply in self.replies())
        if not others:
            return first.copy()
        total = first + others[0]
        for partial in others[1:]:
            total += partial
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
        latest = list(self._latest) or [(0, 0, 0)]
        rtt_us, compute_us, queue_us = np.median(np.array(latest), axis=0)
        return DuckStatistics(
            name=self._name,
            num_calls=self._num_calls,
            rtt_us=float(rtt_us),
            compute_us=float(compute_us),
            queue_us=float(queue_us),
        )


def _describe_until(duck: Duck, give_up_s: float) -> DuckInfo:
    while True:
        try:
            return duck.describe()
        except DuckUnavailable:
            if time.monotonic() >= give_up_s:
                raise
        time.sleep(_CONNECT_POLL_S)


def _partial_f32(reply: MoeReply) -> npt.NDArray[np.float32]:
    partial = reply.partial
    if partial.dtype == np.uint16:
        return bf16_to_f32(partial.view(np.uint16))
    return partial.view(np.float32)


def _check_version(name: str, info: DuckInfo) -> None:
    if info.protocol_version != PROTOCOL_VERSION:
        raise DuckProtocolError(
            f"duck {name} speaks protocol version {info.protocol_version}, this host "
            f"{PROTOCOL_VERSION}; install the same vllm_duck on both"
        )


def _check_model(
    name: str, got: ModelSummary, expect: ModelSummary, *, owner: str
) -> None:
    if got.weight_format in REQUANTIZED_FORMATS.values():
        # Made from whatever the checkpoint has.
        got = replace(got, weight_format=expect.weight_format)
    for what in ModelSummary.__dataclass_fields__:
        expected_value, got_value = getattr(expect, what), getattr(got, what)
        if got_value != expected_value:
            raise DuckConfigError(
                f"duck {name} has {what} {got_value}, {owner} has {expected_value}; "
                "start all ducks and the host with the same checkpoint"
            )


def _check_weight_formats(names: Sequence[str], infos: Sequence[DuckInfo]) -> None:
    first = infos[0].weight_format
    for name, info in zip(names, infos, strict=True):
        if info.weight_format != first:
            raise DuckConfigError(
                f"duck {name} holds {info.weight_format}, duck {names[0]} {first}; "
                "split or serve all of them with the same --weight-format"
            )
