from typing import Any

def layer_new(
    *,
    num_experts: int,
    hidden_size: int,
    num_columns: int,
    column_offset: int,
    format: int,
) -> object: ...
def layer_load(
    layer: object,
    expert: int,
    gate: Any,
    up: Any,
    down: Any,
    gate_scale: Any,
    up_scale: Any,
    down_scale: Any,
) -> tuple[int, int] | None: ...
def layer_resident_bytes(layer: object) -> int: ...
def layer_first_missing(layer: object) -> int: ...
def quantize(
    weight: Any,
    scale: Any,
    *,
    row_offset: int,
    k_offset: int,
    format: int,
    codes: Any,
    scales: Any,
) -> bool: ...
def engine_new(num_threads: int, isa: str, cpus: tuple[int, ...]) -> object: ...
def engine_isa(engine: object) -> str: ...
def engine_first_touch(engine: object, layer: object) -> None: ...
def forward(
    engine: object,
    layer: object,
    hidden: Any,
    topk_ids: Any,
    topk_weights: Any,
    expert_lo: int,
    n_routed_experts: int,
    out: Any,
) -> None: ...
def shard_new(
    engine: object,
    layers: dict[int, object],
    expert_lo: int,
    n_routed_experts: int,
) -> object: ...
def encode_request(
    *,
    request_id: int,
    reply_dtype: int,
    layer_idx: int,
    num_rows: int,
    hidden_size: int,
    num_topk: int,
    hidden: Any,
    topk_ids: Any,
    topk_weights: Any,
) -> bytes: ...
def encode_reply(
    *,
    request_id: int,
    num_rows: int,
    hidden_size: int,
    dtype: int,
    queue_us: int,
    compute_us: int,
    partial: Any,
) -> bytes: ...
def encode_refusal(request_id: int, status: int, error: str) -> bytes: ...
def parse_request(message: bytes) -> dict[str, Any] | int: ...
def parse_reply(message: bytes) -> dict[str, Any] | int: ...
def crc32c(data: Any, crc: int) -> int: ...
def supported_isas() -> list[str]: ...
