from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Handle: TypeAlias = object
# The memory of a contiguous array: tensor.data_ptr(), or a numpy array.
Memory: TypeAlias = int | npt.NDArray[np.generic]

def supported_isas() -> list[str]: ...
def host_new(num_threads: int, isa: str, work_per_thread: int) -> Handle | None: ...
def host_isa(host: Handle) -> str: ...
def step_new(
    *,
    num_requests: int,
    block_size: int,
    row_begin: Memory,
    first_visible: Memory,
    slots: Memory,
    table: Memory,
    table_stride: int,
) -> Handle: ...
def norm_new(weight: Memory, size: int, eps: float) -> Handle: ...

# Of matrices one below the other: their number; of each the address, that of its
# scales or 0, its rows.
Matrices: TypeAlias = npt.NDArray[np.int64]

def linear_new(host: Handle, *, k: int, weight: Matrices) -> Handle: ...
def mlp_new(
    host: Handle,
    *,
    hidden_size: int,
    columns: int,
    gate: Matrices,
    up: Matrices,
    down: Matrices,
) -> Handle: ...
def router_new(
    host: Handle,
    *,
    weight: Memory,
    bias: Memory,
    hidden_size: int,
    n_routed_experts: int,
    num_experts_per_tok: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Handle: ...
def attention_new(
    host: Handle,
    *,
    hidden_size: int,
    num_attention_heads: int,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
    index_n_heads: int,
    index_head_dim: int,
    index_topk: int,
    is_fp8: bool,
    scale: float,
    index_scale: float,
    eps: float,
    index_eps: float,
    down: Matrices,
    up: Matrices,
    kv_b: Matrices,
    out: Matrices,
    input_norm: Memory,
    q_norm: Memory,
    kv_norm: Memory,
    output_norm: Memory,
    index_norm: Memory,
    index_bias: Memory,
) -> Handle: ...
def norm(host: Handle, norm: Handle, rows: int, x: Memory, out: Memory) -> None: ...
def linear(
    host: Handle,
    linear: Handle,
    rows: int,
    x: Memory,
    is_bf16: bool,
    out: Memory,
) -> None: ...
def mlp(
    host: Handle,
    mlp: Handle,
    rows: int,
    x: Memory,
    residual: Memory,
    out: Memory,
    /,
) -> None: ...
def route(
    host: Handle,
    router: Handle,
    rows: int,
    x: Memory,
    ids: Memory,
    weights: Memory,
) -> None: ...
def add(
    host: Handle,
    size: int,
    residual: Memory,
    shared: Memory,
    routed: Memory,
    out: Memory,
    /,
) -> None: ...
def attend(
    host: Handle,
    attention: Handle,
    step: Handle,
    rows: int,
    hidden: Memory,
    rotations: Memory,
    latent_cache: Memory,
    index_cache: Memory,
    chosen: Memory,
    is_chosen: bool,
    residual: Memory,
    normed: Memory,
    /,
) -> None: ...
