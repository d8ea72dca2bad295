"""Turns the records of `duck` into message bytes and back.

Pure: no sockets, no clocks. The only module that imports the generated code.

Invariants, pinned by tests:
- what is decoded has passed every check of shape, dtype and range that needs no model;
- a message that does not parse raises DuckProtocolError; one that parses but does not
  fit itself raises RequestShapeError, which knows the request id to answer to;
- what is encoded has a checksum, and one byte changed on the way is an error. A request
  without a checksum is taken, since a client by hand may not care; a reply is not.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from vllm_duck.errors import DuckProtocolError, DuckShapeError
from vllm_duck.executor import _kernel, duck_pb2
from vllm_duck.executor.duck import (
    BF16,
    F32,
    DuckInfo,
    EncodedRequest,
    MoeRequest,
    Partial,
    ReplyDtype,
    Shard,
)


def _tag(field_number: int) -> bytes:
    """What precedes a length-delimited field; one byte while numbers are below 16."""
    return bytes([field_number << 3 | 2])


# Once, here: looking a number up in a generated class costs as much as a whole field.
_HIDDEN_TAG = _tag(duck_pb2.ForwardRequest.HIDDEN_FIELD_NUMBER)
_TOPK_IDS_TAG = _tag(duck_pb2.ForwardRequest.TOPK_IDS_FIELD_NUMBER)
_TOPK_WEIGHTS_TAG = _tag(duck_pb2.ForwardRequest.TOPK_WEIGHTS_FIELD_NUMBER)
_PARTIAL_TAG = _tag(duck_pb2.ForwardReply.PARTIAL_FIELD_NUMBER)
# The checksum ends a message: a tag and a little-endian uint32.
_CHECKSUM_TAG = bytes([duck_pb2.ForwardRequest.CHECKSUM_FIELD_NUMBER << 3 | 5])
_CHECKSUM_BYTES = 5

DESCRIBE_REQUEST = duck_pb2.DescribeRequest().SerializeToString()

_I32 = np.dtype(np.int32)
_WIRE_DTYPE: dict[ReplyDtype, duck_pb2.DType] = {
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
) -> EncodedRequest:
    """Write a request as bytes, copying each tensor once."""
    num_rows, hidden_size = request.hidden.shape
    head = duck_pb2.ForwardRequest(
        request_id=request_id,
        layer_idx=request.layer_idx,
        num_rows=num_rows,
        hidden_size=hidden_size,
        num_topk=request.topk_ids.shape[1],
        reply_dtype=_WIRE_DTYPE[reply_dtype],
    )
    message = _append_tensors(
        head.SerializeToString(),
        (_HIDDEN_TAG, request.hidden),
        (_TOPK_IDS_TAG, request.topk_ids),
        (_TOPK_WEIGHTS_TAG, request.topk_weights),
    )
    return EncodedRequest(request_id, message)


def decode_request(message: bytes) -> DecodedRequest:
    """Read a request.

    Raises:
        DuckProtocolError: the bytes are not a ForwardRequest.
        ChecksumError: they were another one when they were sent.
        RequestShapeError: they are, but sizes and tensors disagree.
    """
    try:
        wire = duck_pb2.ForwardRequest.FromString(message)
    except DecodeError as error:
        raise DuckProtocolError(
            f"expected a duck.v1.ForwardRequest, got {len(message)} bytes that do not "
            "parse as one"
        ) from error
    if wire.HasField("checksum"):
        _check_checksum("duck.v1.ForwardRequest", message, wire.checksum)
    try:
        return _checked_request(wire)
    except DuckShapeError as error:
        raise RequestShapeError(str(error), request_id=wire.request_id) from error


def encode_reply(
    partial: Partial, *, request_id: int, queue_us: int, compute_us: int
) -> bytes:
    """Write a partial sum [T, H] as a reply."""
    num_rows, hidden_size = partial.shape
    head = duck_pb2.ForwardReply(
        request_id=request_id,
        status=duck_pb2.STATUS_OK,
        num_rows=num_rows,
        hidden_size=hidden_size,
        dtype=_WIRE_DTYPE["bf16" if partial.dtype == BF16 else "fp32"],
        queue_us=queue_us,
        compute_us=compute_us,
    )
    return _append_tensors(head.SerializeToString(), (_PARTIAL_TAG, partial))


def encode_refusal(request_id: int, status: ReplyStatus, *, error: str) -> bytes:
    """Write a reply that says why there is no partial sum."""
    head = duck_pb2.ForwardReply(
        request_id=request_id, status=duck_pb2.Status.Name(status), error=error
    )
    return _append_tensors(head.SerializeToString())


def decode_reply(message: bytes) -> DecodedReply:
    """Read a reply.

    Raises:
        DuckProtocolError: the bytes are not a ForwardReply that fits itself.
        ChecksumError: it was another one when it was sent.
    """
    try:
        wire = duck_pb2.ForwardReply.FromString(message)
        if not wire.HasField("checksum"):
            raise DuckShapeError("it has no checksum")
        _check_checksum("duck.v1.ForwardReply", message, wire.checksum)
        status = ReplyStatus(wire.status)
        partial = _reply_tensor(wire) if status is ReplyStatus.OK else None
    except (DecodeError, ValueError) as error:
        raise DuckProtocolError(
            f"expected a duck.v1.ForwardReply, got {len(message)} bytes that are not "
            f"a sound one: {error}"
        ) from error
    return DecodedReply(
        request_id=wire.request_id,
        status=status,
        error=wire.error,
        partial=partial,
        queue_us=wire.queue_us,
        compute_us=wire.compute_us,
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
        DuckProtocolError: the bytes are not a DescribeReply.
    """
    try:
        wire = duck_pb2.DescribeReply.FromString(message)
    except DecodeError as error:
        raise DuckProtocolError(
            f"expected a duck.v1.DescribeReply, got {len(message)} bytes that do not "
            "parse as one"
        ) from error
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


def _checked_request(wire: duck_pb2.ForwardRequest) -> DecodedRequest:
    rows, topk = wire.num_rows, wire.num_topk
    reply_dtype = _REPLY_DTYPE.get(wire.reply_dtype)
    if reply_dtype is None:
        raise DuckShapeError(
            f"reply_dtype must be DTYPE_BF16 or DTYPE_F32, got {wire.reply_dtype}"
        )
    request = MoeRequest(
        layer_idx=wire.layer_idx,
        hidden=_tensor("hidden", wire.hidden, BF16, (rows, wire.hidden_size)),
        topk_ids=_tensor("topk_ids", wire.topk_ids, _I32, (rows, topk)),
        topk_weights=_tensor("topk_weights", wire.topk_weights, F32, (rows, topk)),
    )
    return DecodedRequest(wire.request_id, request, reply_dtype)


def _reply_tensor(wire: duck_pb2.ForwardReply) -> Partial:
    name = _REPLY_DTYPE.get(wire.dtype)
    if name is None:
        raise DuckShapeError(f"dtype must be DTYPE_BF16 or DTYPE_F32, got {wire.dtype}")
    shape = (wire.num_rows, wire.hidden_size)
    return _tensor("partial", wire.partial, NUMPY_DTYPE[name], shape)


def _tensor(
    name: str, data: bytes, dtype: np.dtype, shape: tuple[int, int]
) -> np.ndarray:
    expected_bytes = shape[0] * shape[1] * dtype.itemsize
    if len(data) != expected_bytes:
        raise DuckShapeError(
            f"{name} of shape {list(shape)} must have {expected_bytes} bytes, "
            f"got {len(data)}"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def _append_tensors(head: bytes, *tensors: tuple[bytes, np.ndarray]) -> bytes:
    """Append bytes fields, and last the checksum, to a serialized message.

    A protobuf message is the concatenation of its fields, so the tensors, which are
    nearly all of it, go in with one copy. Through the generated class it would be
    three: tobytes, the field, the serialized message.
    """
    parts: list[bytes | memoryview] = [head]
    for tag, tensor in tensors:
        parts += (tag, _varint(tensor.nbytes), tensor.data if tensor.size else b"")
    checksum = 0
    for part in parts:
        checksum = _kernel.crc32c(part, checksum)
    parts += (_CHECKSUM_TAG, checksum.to_bytes(4, "little"))
    return b"".join(parts)


def _check_checksum(name: str, message: bytes, got: int) -> None:
    covered = memoryview(message)[:-_CHECKSUM_BYTES]
    is_last = message[-_CHECKSUM_BYTES:] == _CHECKSUM_TAG + got.to_bytes(4, "little")
    if not is_last or _kernel.crc32c(covered, 0) != got:
        raise ChecksumError(
            f"expected a {name}, got {len(message)} bytes with a wrong checksum; "
            "something between host and duck damages what it passes on"
        )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
