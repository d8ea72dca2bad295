"""Turns the records of `duck` into message bytes and back.

Pure: no sockets, no clocks. The only module that imports the generated code. Requests
and replies are the native stream's code (csrc/stream/proto.h), so that both transports
take and refuse the same bytes, and a call costs grpcio's side microseconds.

Invariants, pinned by tests:
- what is decoded has passed every check of shape, dtype and range that needs neither
  model nor request;
- a message that does not parse raises DuckProtocolError; one that parses but does not
  fit itself raises RequestShapeError, which knows the request id to answer to;
- what is encoded has a checksum, and one byte changed on the way is an error. A request
  without a checksum is taken, since a client by hand may not care; a reply is not.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from vllm_duck.errors import DuckProtocolError, DuckShapeError
from vllm_duck.executor import _kernel
from vllm_duck.executor.duck import (
    BF16,
    F32,
    DuckInfo,
    MoeRequest,
    Partial,
    ReplyDtype,
    Shard,
)
from vllm_duck.executor.wire import duck_pb2

DESCRIBE_REQUEST = duck_pb2.DescribeRequest().SerializeToString()

# Parsed::kBadChecksum of csrc/stream/proto.h; the other failure is kMalformed.
_BAD_CHECKSUM = 2

_I32 = np.dtype(np.int32)
_WIRE_DTYPE: dict[ReplyDtype, int] = {
    "bf16": duck_pb2.DTYPE_BF16,
    "fp32": duck_pb2.DTYPE_F32,
}
_REPLY_DTYPE: dict[int, ReplyDtype] = {
    number: name for name, number in _WIRE_DTYPE.items()
}
NUMPY_DTYPE: dict[ReplyDtype, np.dtype] = {"bf16": BF16, "fp32": F32}


class ReplyStatus(IntEnum):
    """`Status` of duck.proto, for the modules that must not import generated code."""

    UNSPECIFIED = 0
    OK = 1
    INVALID_REQUEST = 2
    INTERNAL = 3


_STATUSES = frozenset(ReplyStatus)

# What a duck says of itself is a few hundred bytes.
_MAX_INFO_BYTES = 64 << 10
_WORDS_OF_INFO = ("model_fingerprint", "weight_format", "isa")
_MAX_WORD = 64


class RequestShapeError(DuckShapeError):
    """A request parsed, but its parts do not fit each other."""

    def __init__(self, message: str, *, request_id: int) -> None:
        super().__init__(message)
        self.request_id = request_id


class ChecksumError(DuckProtocolError):
    """A message was damaged on its way."""


class DecodedRequest(NamedTuple):
    """A request as a duck sees it."""

    request_id: int
    request: MoeRequest
    reply_dtype: ReplyDtype


class DecodedReply(NamedTuple):
    """A reply as the host sees it; `partial` is None unless the status is OK."""

    request_id: int
    status: ReplyStatus
    error: str
    partial: Partial | None
    queue_us: int
    compute_us: int


def encode_request(
    request: MoeRequest, *, request_id: int, reply_dtype: ReplyDtype
) -> bytes:
    """Write a request, copying each tensor once."""
    num_rows, hidden_size = request.hidden.shape
    return _kernel.encode_request(
        request_id=request_id,
        reply_dtype=_WIRE_DTYPE[reply_dtype],
        layer_idx=request.layer_idx,
        num_rows=num_rows,
        hidden_size=hidden_size,
        num_topk=request.topk_ids.shape[1],
        hidden=request.hidden,
        topk_ids=request.topk_ids,
        topk_weights=request.topk_weights,
    )


def decode_request(message: bytes) -> DecodedRequest:
    """Read a request.

    Raises:
        DuckProtocolError: the bytes are not a ForwardRequest.
        ChecksumError: the bytes changed on the way.
        RequestShapeError: the request's sizes and tensors disagree.
    """
    parsed = _kernel.parse_request(message)
    if isinstance(parsed, int):
        raise _unsound("duck.v1.ForwardRequest", message, parsed)
    if parsed["misfit"]:
        raise RequestShapeError(parsed["misfit"], request_id=parsed["request_id"])
    num_rows = parsed["num_rows"]
    hidden_shape = num_rows, parsed["hidden_size"]
    topk_shape = num_rows, parsed["num_topk"]

    def tensor(name: str, dtype: Any, shape: tuple[int, int]) -> Any:
        return _aligned(_tensor(message, parsed[f"{name}_at"], dtype, shape))

    request = MoeRequest(
        layer_idx=parsed["layer_idx"],
        hidden=tensor("hidden", BF16, hidden_shape),
        topk_ids=tensor("topk_ids", _I32, topk_shape),
        topk_weights=tensor("topk_weights", F32, topk_shape),
    )
    reply_dtype = _REPLY_DTYPE[parsed["reply_dtype"]]
    return DecodedRequest(parsed["request_id"], request, reply_dtype)


def encode_reply(
    partial: Partial, *, request_id: int, queue_us: int, compute_us: int
) -> bytes:
    """Write a partial sum [T, H] as a reply."""
    num_rows, hidden_size = partial.shape
    dtype = _WIRE_DTYPE["bf16" if partial.dtype == BF16 else "fp32"]
    return _kernel.encode_reply(
        request_id=request_id,
        num_rows=num_rows,
        hidden_size=hidden_size,
        dtype=dtype,
        queue_us=queue_us,
        compute_us=compute_us,
        partial=partial,
    )


def encode_refusal(request_id: int, status: ReplyStatus, *, error: str) -> bytes:
    """Write a reply that says why there is no partial sum."""
    return _kernel.encode_refusal(request_id, status, error)


def decode_reply(message: bytes) -> DecodedReply:
    """Read a reply.

    Raises:
        DuckProtocolError: the bytes are not a ForwardReply that fits itself.
        ChecksumError: the bytes changed on the way.
    """
    parsed = _kernel.parse_reply(message)
    if isinstance(parsed, int):
        raise _unsound("duck.v1.ForwardReply", message, parsed)
    status = parsed["status"]
    is_ok = status == ReplyStatus.OK
    if not parsed["has_checksum"]:
        problem = "it has no checksum"
    elif status not in _STATUSES:
        problem = f"{status} is not a valid ReplyStatus"
    else:
        problem = parsed["misfit"] if is_ok else ""
    if problem:
        raise DuckProtocolError(
            f"expected a duck.v1.ForwardReply, got {len(message)} bytes that are not "
            f"a sound one: {problem}"
        )
    partial = None
    if is_ok:
        np_dtype = NUMPY_DTYPE[_REPLY_DTYPE[parsed["dtype"]]]
        shape = parsed["num_rows"], parsed["hidden_size"]
        partial = _tensor(message, parsed["partial_at"], np_dtype, shape)
    return DecodedReply(
        request_id=parsed["request_id"],
        status=ReplyStatus(status),
        error=parsed["error"].decode(errors="replace"),
        partial=partial,
        queue_us=parsed["queue_us"],
        compute_us=parsed["compute_us"],
    )


def encode_info(info: DuckInfo) -> bytes:
    """Write what a duck says of itself."""
    shard = info.shard
    return duck_pb2.DescribeReply(
        protocol_version=info.protocol_version,
        model_fingerprint=info.model_fingerprint,
        layer_ids=info.layer_ids,
        shard=duck_pb2.Shard(
            column_lo=shard.column_lo,
            column_hi=shard.column_hi,
            expert_lo=shard.expert_lo,
            expert_hi=shard.expert_hi,
        ),
        hidden_size=info.hidden_size,
        moe_intermediate_size=info.moe_intermediate_size,
        n_routed_experts=info.n_routed_experts,
        weight_format=info.weight_format,
        isa=info.isa,
        num_threads=info.num_threads,
        weight_bytes=info.weight_bytes,
        resident_bytes=info.resident_bytes,
    ).SerializeToString()


def decode_info(message: bytes) -> DuckInfo:
    """Read what a duck says of itself.

    Raises:
        DuckProtocolError: the bytes are not a DescribeReply, or not one of a duck.
    """
    if len(message) > _MAX_INFO_BYTES:
        raise DuckProtocolError(
            f"expected a duck.v1.DescribeReply of at most {_MAX_INFO_BYTES} bytes, got "
            f"{len(message)}"
        )
    try:
        wire = duck_pb2.DescribeReply.FromString(message)
    except DecodeError as error:
        raise DuckProtocolError(
            f"expected a duck.v1.DescribeReply, got {len(message)} bytes that do not "
            "parse as one"
        ) from error
    for name in _WORDS_OF_INFO:
        _check_word(name, getattr(wire, name))
    shard = wire.shard
    return DuckInfo(
        protocol_version=wire.protocol_version,
        model_fingerprint=wire.model_fingerprint,
        layer_ids=tuple(wire.layer_ids),
        shard=Shard(shard.column_lo, shard.column_hi, shard.expert_lo, shard.expert_hi),
        hidden_size=wire.hidden_size,
        moe_intermediate_size=wire.moe_intermediate_size,
        n_routed_experts=wire.n_routed_experts,
        weight_format=wire.weight_format,
        isa=wire.isa,
        num_threads=wire.num_threads,
        weight_bytes=wire.weight_bytes,
        resident_bytes=wire.resident_bytes,
    )


def _check_word(name: str, text: str) -> None:
    """It goes to logs and terminals, and into the identity, which blanks divide."""
    is_word = text.isascii() and text.isprintable() and " " not in text
    if not is_word or len(text) > _MAX_WORD:
        raise DuckProtocolError(
            f"expected a duck.v1.DescribeReply whose {name} is a word of at most "
            f"{_MAX_WORD} letters, got {text[:_MAX_WORD]!a}"
        )


def _unsound(name: str, message: bytes, parsed: int) -> DuckProtocolError:
    what = f"expected a {name}, got {len(message)} bytes"
    if parsed == _BAD_CHECKSUM:
        return ChecksumError(
            f"{what} with a wrong checksum; something between host and duck damages "
            "what it passes on"
        )
    return DuckProtocolError(f"{what} that do not parse as one")


def _tensor(
    message: bytes, position: int, dtype: np.dtype, shape: Sequence[int]
) -> np.ndarray:
    """The part of a message that is a tensor, where it lies."""
    rows, columns = shape
    return np.frombuffer(message, dtype, rows * columns, position).reshape(shape)


def _aligned(tensor: np.ndarray) -> np.ndarray:
    """A copy if needed: kernels read aligned numbers."""
    return tensor if tensor.flags.aligned else tensor.copy()
