from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_BF16: _ClassVar[DType]
    DTYPE_F32: _ClassVar[DType]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATUS_UNSPECIFIED: _ClassVar[Status]
    STATUS_OK: _ClassVar[Status]
    STATUS_INVALID_REQUEST: _ClassVar[Status]
    STATUS_INTERNAL: _ClassVar[Status]
DTYPE_UNSPECIFIED: DType
DTYPE_BF16: DType
DTYPE_F32: DType
STATUS_UNSPECIFIED: Status
STATUS_OK: Status
STATUS_INVALID_REQUEST: Status
STATUS_INTERNAL: Status

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("protocol_version", "model_fingerprint", "layer_ids", "shard", "hidden_size", "moe_intermediate_size", "n_routed_experts", "weight_format", "isa", "num_threads", "weight_bytes", "resident_bytes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MOE_INTERMEDIATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    N_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_fingerprint: str
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    shard: Shard
    hidden_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    weight_format: str
    isa: str
    num_threads: int
    weight_bytes: int
    resident_bytes: int
    def __init__(self, protocol_version: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., layer_ids: _Optional[_Iterable[int]] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., hidden_size: _Optional[int] = ..., moe_intermediate_size: _Optional[int] = ..., n_routed_experts: _Optional[int] = ..., weight_format: _Optional[str] = ..., isa: _Optional[str] = ..., num_threads: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("column_lo", "column_hi", "expert_lo", "expert_hi")
    COLUMN_LO_FIELD_NUMBER: _ClassVar[int]
    COLUMN_HI_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LO_FIELD_NUMBER: _ClassVar[int]
    EXPERT_HI_FIELD_NUMBER: _ClassVar[int]
    column_lo: int
    column_hi: int
    expert_lo: int
    expert_hi: int
    def __init__(self, column_lo: _Optional[int] = ..., column_hi: _Optional[int] = ..., expert_lo: _Optional[int] = ..., expert_hi: _Optional[int] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("request_id", "layer_idx", "num_rows", "hidden_size", "num_topk", "reply_dtype", "hidden", "topk_ids", "topk_weights", "checksum")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDX_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOPK_FIELD_NUMBER: _ClassVar[int]
    REPLY_DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    TOPK_IDS_FIELD_NUMBER: _ClassVar[int]
    TOPK_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    layer_idx: int
    num_rows: int
    hidden_size: int
    num_topk: int
    reply_dtype: DType
    hidden: bytes
    topk_ids: bytes
    topk_weights: bytes
    checksum: int
    def __init__(self, request_id: _Optional[int] = ..., layer_idx: _Optional[int] = ..., num_rows: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_topk: _Optional[int] = ..., reply_dtype: _Optional[_Union[DType, str]] = ..., hidden: _Optional[bytes] = ..., topk_ids: _Optional[bytes] = ..., topk_weights: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class ForwardReply(_message.Message):
    __slots__ = ("request_id", "status", "error", "num_rows", "hidden_size", "dtype", "queue_us", "compute_us", "partial", "checksum")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    status: Status
    error: str
    num_rows: int
    hidden_size: int
    dtype: DType
    queue_us: int
    compute_us: int
    partial: bytes
    checksum: int
    def __init__(self, request_id: _Optional[int] = ..., status: _Optional[_Union[Status, str]] = ..., error: _Optional[str] = ..., num_rows: _Optional[int] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., partial: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...
