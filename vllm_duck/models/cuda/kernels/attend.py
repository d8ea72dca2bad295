"""Sparse attention over the paged latent cache: fixed splits, merged in rising order.

A split is 256 of a row's chosen positions, whatever their number, so a row's additions
depend on its own count alone. Weights are rounded to bf16 before they are summed and
used, so they add up to one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_duck.models.cuda.kernels.formats import (
    LIFT,
    bf16_bits,
    dot,
    e4m3_value,
    load_bf16,
    operand,
    operand_value,
    rounded_operand,
)
from vllm_duck.models.cuda.kernels.launch import (
    require,
    require_power_of_two,
    start,
)
from vllm_duck.models.cuda.kernels.tiles import ATTEND, MERGE, Tile
from vllm_duck.models.kv_format import LatentFormat

SPLIT = 256
# One MMA tile of query rows.
_HEADS_AT_ONCE = 16


@triton.jit
def _attend_split(
    query,
    cache,
    slots,
    counts,
    sums,
    stats,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    TOPK: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    count = tl.load(counts + row)
    begin = split * SPLIT
    if begin >= count:
        return
    end = tl.minimum(count, begin + SPLIT)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    is_head = head < HEADS
    latent, rope, tile = tl.arange(0, L), tl.arange(0, R), tl.arange(0, L // 128)
    ROPE_AT: tl.constexpr = L + 4 * (L // 128)
    q = query + (row * HEADS + head[:, None]) * (L + R)
    q_latent = operand(load_bf16(q + latent[None, :], mask=is_head[:, None]))
    q_rope = operand(load_bf16(q + L + rope[None, :], mask=is_head[:, None]))
    # Not -inf: the difference of two of those is no number.
    peak = tl.full([HEADS_AT_ONCE], -1e30, tl.float32)
    total = tl.zeros([HEADS_AT_ONCE], tl.float32)
    acc = tl.zeros([HEADS_AT_ONCE, L], tl.float32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_key = (at < end)[:, None]
        slot = tl.load(slots + row * TOPK + at, mask=at < end, other=0).to(tl.int64)
        base = cache + slot[:, None] * (ROPE_AT + 2 * R)
        codes = tl.load(base + latent[None, :], mask=is_key, other=0)
        scales_at = (base + L).to(tl.pointer_type(tl.float32)) + tile[None, :]
        scales = tl.load(scales_at, mask=is_key, other=0.0)
        keys = tl.reshape(e4m3_value(codes), [BLOCK, L // 128, 128])
        keys = tl.reshape(keys * scales[:, :, None], [BLOCK, L])
        keys = rounded_operand(keys)
        rope_at = (base + ROPE_AT).to(tl.pointer_type(tl.uint16)) + rope[None, :]
        key_rope = operand(load_bf16(rope_at, mask=is_key))
        logits = tl.zeros([HEADS_AT_ONCE, BLOCK], tl.float32)
        logits = dot(q_latent, tl.trans(keys), logits)
        logits = dot(q_rope, tl.trans(key_rope), logits) * SCALE
        logits = tl.where((at < end)[None, :], logits, -1e30)
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        weight = tl.exp(logits - new_peak[:, None])
        weight = rounded_operand(tl.where((at < end)[None, :], weight, 0.0))
        shrink = tl.exp(peak - new_peak)
        total = total * shrink + tl.sum(operand_value(weight), 1)
        acc = dot(weight, keys, acc * shrink[:, None])
        peak = new_peak
    out = (row * SPLITS + split) * HEADS + head
    tl.store(stats + out * 2, peak, mask=is_head)
    tl.store(stats + out * 2 + 1, total, mask=is_head)
    sums_at = sums + out[:, None] * L + latent[None, :]
    tl.store(sums_at, acc, mask=is_head[:, None])


@triton.jit
def _merge(
    sums,
    stats,
    counts,
    out,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    OUT_SCALE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    latent = tl.arange(0, L)
    count = tl.load(counts + row)
    peak, total = tl.full([], -1e30, tl.float32), tl.full([], 0.0, tl.float32)
    acc = tl.zeros([L], tl.float32)
    for split in range(0, (count + SPLIT - 1) // SPLIT):
        at = (row * SPLITS + split) * HEADS + head
        split_peak = tl.load(stats + at * 2)
        new_peak = tl.maximum(peak, split_peak)
        old, new = tl.exp(peak - new_peak), tl.exp(split_peak - new_peak)
        total = total * old + tl.load(stats + at * 2 + 1) * new
        acc = acc * old + tl.load(sums + at * L + latent) * new
        peak = new_peak
    # Padding attends to nothing.
    acc = tl.where(count > 0, tl.div_rn(acc, tl.where(count > 0, total, 1.0)), 0.0)
    tl.store(out + (row * HEADS + head) * L + latent, bf16_bits(acc * OUT_SCALE))


def num_splits(topk: int) -> int:
    """How many splits the scratch of `attend` has room for."""
    return -(-topk // SPLIT)


def attend(
    query: Tensor,
    cache: Tensor,
    slots: Tensor,
    counts: Tensor,
    sums: Tensor,
    stats: Tensor,
    out: Tensor,
    *,
    scale: float,
    tile: Tile = ATTEND,
    merge_tile: Tile = MERGE,
) -> None:
    """Attend to chosen positions; a row of none is zeros.

    Shapes: T rows, A heads, S = num_splits(topk).
        query   [T, A, L + R]  uint16: absorbed and rotated
        cache   [slots, 656]   uint8, for L 512 and R 64
        slots   [T, topk]      int32, in rising order of positions
        counts  [T]            int32: how many of a row's slots there are
        sums    [T, S, A, L]   fp32, scratch
        stats   [T, S, A, 2]   fp32, scratch: peak and sum of the weights
        out     [T, A, L]      uint16, lifted

    Raises:
        DuckShapeError: shape, dtype or layout; L or R is no power of two.
    """
    require("query", query, (None, None, None), torch.uint16)
    num_rows, heads, size = query.shape
    require("out", out, (num_rows, heads, None), torch.uint16)
    latent = out.shape[2]
    rope = size - latent
    require_power_of_two("kv_lora_rank", latent)
    require_power_of_two("qk_rope_head_dim", rope)
    token_bytes = LatentFormat(latent, rope, "fp8").token_bytes
    require("latent cache", cache, (None, token_bytes), torch.uint8)
    require("slots", slots, (num_rows, None), torch.int32)
    require("counts", counts, (num_rows,), torch.int32)
    topk = slots.shape[1]
    splits = num_splits(topk)
    require("sums", sums, (num_rows, splits, heads, latent), torch.float32)
    require("stats", stats, (num_rows, splits, heads, 2), torch.float32)
    start(
        _attend_split,
        (num_rows, triton.cdiv(heads, _HEADS_AT_ONCE), splits),
        query,
        cache,
        slots,
        counts,
        sums,
        stats,
        tile=tile,
        HEADS=heads,
        L=latent,
        R=rope,
        TOPK=topk,
        SPLIT=SPLIT,
        SPLITS=splits,
        SCALE=scale,
        BLOCK=tile.block,
        HEADS_AT_ONCE=_HEADS_AT_ONCE,
    )
    start(
        _merge,
        (num_rows, heads),
        sums,
        stats,
        counts,
        out,
        tile=merge_tile,
        HEADS=heads,
        L=latent,
        SPLIT=SPLIT,
        SPLITS=splits,
        OUT_SCALE=LIFT,
    )
