"""What a duck is to the rest of the package: the records and the protocols.

Everything here is numpy: a duck machine has neither torch nor vLLM. A bf16 tensor
is a `uint16` array that holds its bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_duck.errors import DuckConfigError, DuckShapeError

PROTOCOL_VERSION = 2

BF16 = np.dtype(np.uint16)
F32 = np.dtype(np.float32)

# How a checkpoint stores its experts.
CHECKPOINT_FORMATS = ("e4m3-block128", "bf16")
# What --weight-format takes, and the name of what the experts then become.
REQUANTIZED_FORMATS = {"int8": "int8-group128", "int4": "int4-group32"}

# How the host wants partial sums on the wire.
ReplyDtype = Literal["bf16", "fp32"]
Partial: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.float32]


@dataclass(frozen=True)
class ModelSummary:
    """What host and ducks must agree on about the model, whoever holds which shard."""

    fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    # "e4m3-block128" or "bf16"; of ducks also one of REQUANTIZED_FORMATS.
    weight_format: str

    def requantized(self, choice: str | None) -> "ModelSummary":
        """The model as ducks with this --weight-format hold it; None changes nothing.

        Raises:
            DuckConfigError: the experts are re-quantised already, to another format.
        """
        if choice is None:
            return self
        weight_format = REQUANTIZED_FORMATS[choice]
        if self.weight_format not in (*CHECKPOINT_FORMATS, weight_format):
            raise DuckConfigError(
                f"--weight-format {choice} must find the checkpoint's own weights, got "
                f"{self.weight_format}; split the model again"
            )
        return replace(self, weight_format=weight_format)


@dataclass(frozen=True)
class Shard:
    """The part of every MoE layer that one duck owns: half-open ranges."""

    column_lo: int
    column_hi: int
    expert_lo: int
    expert_hi: int

    @property
    def num_columns(self) -> int:
        return self.column_hi - self.column_lo

    @property
    def num_experts(self) -> int:
        return self.expert_hi - self.expert_lo

    def __str__(self) -> str:
        return (
            f"columns [{self.column_lo}, {self.column_hi}) "
            f"x experts [{self.expert_lo}, {self.expert_hi})"
        )


@dataclass(frozen=True)
class DuckInfo:
    """What a duck says of itself when it is asked to Describe."""

    protocol_version: int
    model_fingerprint: str
    layer_ids: tuple[int, ...]
    shard: Shard
    # The whole model's sizes, so that the host can check that all shards tile them.
    hidden_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    # See ModelSummary.
    weight_format: str
    # The instruction set the kernel chose: "amx", "avx512", "avx2", "portable".
    isa: str
    num_threads: int
    weight_bytes: int
    resident_bytes: int

    @property
    def model(self) -> ModelSummary:
        return ModelSummary(
            fingerprint=self.model_fingerprint,
            layer_ids=self.layer_ids,
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
            n_routed_experts=self.n_routed_experts,
            weight_format=self.weight_format,
        )


@dataclass(frozen=True, slots=True)
class MoeRequest:
    """One lane of tokens for one MoE layer, as every duck gets it.

    The arrays may be views of any memory that this machine's CPU reads, a device's
    pinned buffer too.

    Shapes: T tokens, H hidden size, A experts per token.
        hidden        [T, H]  bf16 bits (uint16), C-contiguous
        topk_ids      [T, A]  int32, global expert ids
        topk_weights  [T, A]  float32
    Raises:
        DuckShapeError: a dtype, a rank or T disagrees.
    """

    layer_idx: int
    hidden: npt.NDArray[np.uint16]
    topk_ids: npt.NDArray[np.int32]
    topk_weights: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        _check_array("hidden", self.hidden, BF16)
        _check_array("topk_ids", self.topk_ids, np.dtype(np.int32))
        _check_array("topk_weights", self.topk_weights, F32)
        num_tokens, _ = self.hidden.shape
        if self.topk_ids.shape != self.topk_weights.shape:
            raise DuckShapeError(
                f"topk_ids and topk_weights must have one shape, got "
                f"{self.topk_ids.shape} and {self.topk_weights.shape}"
            )
        if self.topk_ids.shape[0] != num_tokens:
            raise DuckShapeError(
                f"topk_ids must have a row for each of the {num_tokens} hidden rows, "
                f"got {self.topk_ids.shape[0]}"
            )


# The records without invariants are tuples: a frozen dataclass costs microseconds to
# make, twice for every call of every duck.
class MoeReply(NamedTuple):
    """A duck's partial sum for one MoeRequest.

    partial  [T, H]  bf16 bits (uint16) or float32, as the client asked; read-only
    Times are whole microseconds: on the duck waiting for the kernel, and in it; on the
    host from send() to the arrival of the reply.
    """

    partial: Partial
    queue_us: int
    compute_us: int
    rtt_us: int


class CallTimes(NamedTuple):
    """The times of one request at all ducks: each is the slowest duck's, in us."""

    # When it was sent, `time.perf_counter_ns`.
    sent_ns: int
    rtt_us: int
    compute_us: int
    # Network time: what is neither queue nor compute.
    link_us: int


class MoeSum(NamedTuple):
    """The ducks' partial sums of one request, added up in duck order."""

    # [T, H] float32, fresh and writable.
    total: npt.NDArray[np.float32]
    times: CallTimes


# Computes one shard's partial sum [T, H] of a request, in the dtype that is asked for:
# a kernel can round on its way out, which is cheaper than numpy afterwards.
MoeFunction: TypeAlias = Callable[[MoeRequest, ReplyDtype], Partial]


class ServedShard(Protocol):
    """A MoeFunction over one shard, as a duck serves it."""

    @property
    def info(self) -> DuckInfo: ...

    def __call__(self, request: MoeRequest, reply_dtype: ReplyDtype) -> Partial: ...

    def native_compute(self) -> object:
        """The same for C++, which calls it without Python: csrc/base/compute.h."""
        ...


T_co = TypeVar("T_co", covariant=True)


class InFlight(Protocol[T_co]):
    """Something that was sent, and whose answer is still to come."""

    def is_done(self) -> bool:
        """Whether wait() would return or raise at once."""
        ...

    def wait(self) -> T_co:
        """Wait for the answer.

        Raises:
            DuckTransportError: a duck went away, is late, or refused the call.
        """
        ...


class Describer(Protocol):
    """Asks one duck what it holds."""

    @property
    def name(self) -> str:
        """The endpoint, as logs and errors name this duck."""
        ...

    def describe(self) -> DuckInfo: ...

    def check(self, identity: str, deadline_s: float) -> None:
        """Ask whether the duck of this identity is there.

        Raises:
            DuckTransportError: it does not answer, or another duck does.
        """
        ...


class Duck(Protocol):
    """One remote (or in-process) executor of one shard, called by a client of its own.

    What a transport has that sends to all ducks at once, as the native one, is no Duck.
    """

    @property
    def name(self) -> str:
        """The endpoint, as logs and errors name this duck."""
        ...

    def send(self, request: MoeRequest) -> InFlight[MoeReply]:
        """Send a request and return at once; several may be in flight."""
        ...

    def close(self) -> None: ...


class Ducks(Protocol):
    """All ducks as one executor."""

    def send(self, request: MoeRequest) -> InFlight[MoeSum]:
        """Send one request to all ducks and return at once; several may be in flight.

        The arrays are read before it returns, and may be overwritten then.

        Raises:
            DuckTransportError: a duck is gone.
        """
        ...


@dataclass(frozen=True)
class DuckStatistics:
    """How one duck did: medians over its latest calls, microseconds.

    A round trip begins when its request is sent, for the last time: that a duck was
    lost meanwhile is not in it.
    """

    name: str
    num_calls: int
    rtt_us: float
    compute_us: float
    queue_us: float
    # That 1 % of the round trips take, or more.
    rtt_p99_us: float = 0.0

    @classmethod
    def of(
        cls, name: str, num_calls: int, latest: npt.NDArray[np.uint32]
    ) -> "DuckStatistics":
        """latest: [calls, 3], of the latest calls rtt_us, compute_us, queue_us."""
        medians = np.median(latest, axis=0) if len(latest) else np.zeros(3)
        rtt_us, compute_us, queue_us = (float(median) for median in medians)
        p99_us = float(np.percentile(latest[:, 0], 99)) if len(latest) else 0.0
        return cls(name, num_calls, rtt_us, compute_us, queue_us, p99_us)


class FanOut(Ducks, Protocol):
    """How a fleet calls its ducks: what a transport's `connect` gives."""

    def statistics(self) -> list[DuckStatistics]:
        """How each duck did, in duck order."""
        ...

    def begin_step(self, limit_s: float) -> None:
        """A step begins, which waits for lost ducks for `limit_s` at most in all."""
        ...

    def close(self) -> None: ...


def _check_array(name: str, array: np.ndarray, dtype: np.dtype) -> None:
    if array.dtype != dtype or array.ndim != 2:
        raise DuckShapeError(
            f"{name} must be a 2-d array of {dtype}, got {array.ndim}-d {array.dtype}"
        )
    if not array.flags.c_contiguous:
        raise DuckShapeError(f"{name} must be C-contiguous")
