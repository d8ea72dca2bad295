"""From the projections to what attention reads: norms, rotations, both caches.

The caches' bytes are those of the C++ host, from the same numbers: its order of sums
(16 chains, folded in halves), its divisions and roots, and no fused multiply-adds.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_duck.models.cuda.kernels.formats import LIFT, bf16_bits
from vllm_duck.models.cuda.kernels.launch import (
    require,
    require_power_of_two,
    start,
)
from vllm_duck.models.cuda.kernels.rows import (
    cache_code,
    cache_scale,
    chains,
    load_sum,
    magnitude,
    rms_scale,
    rotate,
    store_pairs,
)
from vllm_duck.models.cuda.kernels.tiles import SPLIT, Tile
from vllm_duck.models.kv_format import IndexFormat, LatentFormat


@triton.jit
def _append_latent(
    parts,
    stride,
    rotation,
    norm,
    out,
    L: tl.constexpr,
    R: tl.constexpr,
    EPS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    TILES: tl.constexpr = L // 128
    scale = rms_scale(chains(parts, stride, 0.0, L, SPLITS, True), L, EPS)
    at = tl.arange(0, L)
    x = load_sum(parts, at, at < L, stride, SPLITS) * scale * tl.load(norm + at)
    tiles = tl.reshape(x, [TILES, 128])
    scales = cache_scale(tl.max(magnitude(tiles), 1))
    codes = cache_code(tiles, scales[:, None])
    tl.store(out + at, tl.reshape(codes, [L]))
    scales_at = (out + L).to(tl.pointer_type(tl.float32))
    tl.store(scales_at + tl.arange(0, TILES), scales)
    pair = tl.arange(0, R // 2)
    real = load_sum(parts + L, 2 * pair, pair < R, stride, SPLITS)
    imaginary = load_sum(parts + L + 1, 2 * pair, pair < R, stride, SPLITS)
    real, imaginary = rotate(real, imaginary, rotation, pair, pair < R)
    rope_at = (out + L + 4 * TILES).to(tl.pointer_type(tl.uint16))
    store_pairs(rope_at, pair, real, imaginary, pair < R)


@triton.jit
def _append_index(
    parts,
    stride,
    rotation,
    norm,
    bias,
    out,
    D: tl.constexpr,
    R: tl.constexpr,
    EPS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    mean = tl.div_rn(chains(parts, stride, 0.0, D, SPLITS, False), D * 1.0)
    scale = rms_scale(chains(parts, stride, mean, D, SPLITS, True), D, EPS)
    pair = tl.arange(0, D // 2)
    real = load_sum(parts, 2 * pair, pair < D, stride, SPLITS) - mean
    real = real * scale * tl.load(norm + 2 * pair) + tl.load(bias + 2 * pair)
    at = 2 * pair + 1
    imaginary = load_sum(parts, at, pair < D, stride, SPLITS) - mean
    imaginary = imaginary * scale * tl.load(norm + at) + tl.load(bias + at)
    turned = rotate(real, imaginary, rotation, pair, pair < R // 2)
    real = tl.where(pair < R // 2, turned[0], real)
    imaginary = tl.where(pair < R // 2, turned[1], imaginary)
    peak = tl.max(tl.maximum(magnitude(real), magnitude(imaginary)), 0)
    scale = cache_scale(peak)
    low = cache_code(real, scale).to(tl.uint16)
    high = cache_code(imaginary, scale).to(tl.uint16)
    tl.store(out.to(tl.pointer_type(tl.uint16)) + pair, low | (high << 8))
    tl.store((out + D).to(tl.pointer_type(tl.float32)), scale)


@triton.jit(do_not_specialize=["num_rows"])
def _split_down(
    down,
    head_weights,
    slots,
    rotations,
    q_norm,
    kv_norm,
    index_norm,
    index_bias,
    low_query,
    index_weights,
    latent_cache,
    index_cache,
    num_rows,
    Q: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    INDEX_EPS: tl.constexpr,
    INDEX_SCALE: tl.constexpr,
    OUT_SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    N: tl.constexpr = Q + L + R + D
    parts, stride = down + row * N, num_rows.to(tl.int64) * N
    rotation = rotations + row * R
    slot = tl.load(slots + row)
    # One program for each of what a row becomes: they need nothing of each other.
    part = tl.program_id(1)
    if part == 0:
        at = tl.arange(0, Q_BLOCK)
        x = load_sum(parts, at, at < Q, stride, SPLITS)
        scale = rms_scale(tl.sum(x * x, 0), Q, EPS)
        x = x * scale * tl.load(q_norm + at, mask=at < Q, other=0.0)
        tl.store(low_query + row * Q + at, bf16_bits(x * OUT_SCALE), mask=at < Q)
    elif part == 1:
        if slot >= 0:
            BYTES: tl.constexpr = L + 4 * (L // 128) + 2 * R
            out = latent_cache + slot * BYTES
            _append_latent(parts + Q, stride, rotation, kv_norm, out, L, R, EPS, SPLITS)
    elif part == 2:
        if slot >= 0:
            keys, out = parts + Q + L + R, index_cache + slot * (D + 4)
            _append_index(
                keys,
                stride,
                rotation,
                index_norm,
                index_bias,
                out,
                D,
                R,
                INDEX_EPS,
                SPLITS,
            )
    else:
        head = tl.arange(0, HEAD_BLOCK)
        stride = num_rows.to(tl.int64) * HEADS
        weights = head_weights + row * HEADS
        w = load_sum(weights, head, head < HEADS, stride, HEAD_SPLITS)
        out = index_weights + row * HEADS + head
        tl.store(out, w * INDEX_SCALE, mask=head < HEADS)


@triton.jit
def _split_head(
    x,
    rotation,
    nope,
    rope,
    NOPE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    R: tl.constexpr,
    OUT_SCALE: tl.constexpr,
):
    at = tl.arange(0, NOPE_BLOCK)
    plain = tl.load(x + at, mask=at < NOPE, other=0.0)
    tl.store(nope + at, bf16_bits(plain * OUT_SCALE), mask=at < NOPE)
    pair = tl.arange(0, R // 2)
    real, imaginary = tl.load(x + NOPE + 2 * pair), tl.load(x + NOPE + 1 + 2 * pair)
    real, imaginary = rotate(real, imaginary, rotation, pair, pair < R)
    store_pairs(rope, pair, real, imaginary, pair < R)


@triton.jit
def _split_index_head(x, rotation, out, D: tl.constexpr, R: tl.constexpr):
    pair = tl.arange(0, D // 2)
    real, imaginary = tl.load(x + 2 * pair), tl.load(x + 1 + 2 * pair)
    is_rope = pair < R // 2
    turned = rotate(real, imaginary, rotation, pair, is_rope)
    real = tl.where(is_rope, turned[0], real)
    imaginary = tl.where(is_rope, turned[1], imaginary)
    store_pairs(out, pair, real, imaginary, pair < D)


@triton.jit
def _split_up(
    up,
    rotations,
    nope,
    query,
    index_query,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    D: tl.constexpr,
    OUT_SCALE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_at = up + row * (HEADS * (NOPE + R) + INDEX_HEADS * D)
    rotation = rotations + row * R
    if head < HEADS:
        at = row * HEADS + head
        x, rope = row_at + head * (NOPE + R), query + at * (L + R) + L
        out = nope + at * NOPE
        _split_head(x, rotation, out, rope, NOPE, NOPE_BLOCK, R, OUT_SCALE)
    else:
        index_head = head - HEADS
        x = row_at + HEADS * (NOPE + R) + index_head * D
        out = index_query + (row * INDEX_HEADS + index_head) * D
        _split_index_head(x, rotation, out, D, R)


@dataclass(frozen=True)
class KeyNorms:
    """The norms behind the down projection, fp32.

    Shapes: q [Q], kv [L], index and index_bias [D], in the interleaved order of RoPE.
    """

    q: Tensor
    kv: Tensor
    index: Tensor
    index_bias: Tensor
    eps: float
    index_eps: float


@dataclass(frozen=True)
class Caches:
    """A layer's caches, of L 512: latent [slots, 656] and index [slots, 132] uint8."""

    latent: Tensor
    index: Tensor


def split_down(
    down: Tensor,
    head_weights: Tensor,
    slots: Tensor,
    rotations: Tensor,
    norms: KeyNorms,
    caches: Caches,
    low_query: Tensor,
    index_weights: Tensor,
    *,
    index_scale: float,
    tile: Tile = SPLIT,
) -> None:
    """Append the rows' keys to both caches, and norm what their queries are made of.

    Shapes: T rows, S parts of each sum, R rotated channels.
        down           [S, T, Q + L + R + D]  fp32, from the projections of q, kv, index
        head_weights   [S', T, index heads]   fp32
        slots          [T]                    int64; -1: a row of padding, not cached
        rotations      [T, R]                 fp32: cos, sin, cos, sin, ...
        low_query      [T, Q]                 uint16, out, lifted
        index_weights  [T, index heads]       fp32, out, times index_scale

    Raises:
        DuckShapeError: shape, dtype or layout; L or R is no power of two.
    """
    q, latent, dim = (len(norm) for norm in (norms.q, norms.kv, norms.index))
    num_rows, rope = rotations.shape
    heads = index_weights.shape[-1]
    require_power_of_two("kv_lora_rank", latent)
    require_power_of_two("qk_rope_head_dim", rope)
    fp32, size = torch.float32, q + latent + rope + dim
    require("down", down, (None, num_rows, size), fp32)
    require("head_weights", head_weights, (None, num_rows, heads), fp32)
    require("slots", slots, (num_rows,), torch.int64)
    require("rotations", rotations, (num_rows, rope), fp32)
    require("index_bias", norms.index_bias, (dim,), fp32)
    for name in ("q", "kv", "index"):
        require(f"{name} norm", getattr(norms, name), (None,), fp32)
    require_caches(caches, latent, rope, dim)
    require("low_query", low_query, (num_rows, q), torch.uint16)
    require("index_weights", index_weights, (num_rows, heads), fp32)
    start(
        _split_down,
        (num_rows, 4),
        down,
        head_weights,
        slots,
        rotations,
        norms.q,
        norms.kv,
        norms.index,
        norms.index_bias,
        low_query,
        index_weights,
        caches.latent,
        caches.index,
        num_rows,
        tile=tile,
        Q=q,
        L=latent,
        R=rope,
        D=dim,
        HEADS=heads,
        Q_BLOCK=triton.next_power_of_2(q),
        HEAD_BLOCK=triton.next_power_of_2(heads),
        EPS=norms.eps,
        INDEX_EPS=norms.index_eps,
        INDEX_SCALE=index_scale,
        OUT_SCALE=LIFT,
        SPLITS=down.shape[0],
        HEAD_SPLITS=head_weights.shape[0],
    )


def split_up(
    up: Tensor,
    rotations: Tensor,
    nope: Tensor,
    query: Tensor,
    index_query: Tensor,
    *,
    tile: Tile = SPLIT,
) -> None:
    """Cut the up projection into heads, and rotate what is to be rotated.

    Shapes: T rows, A heads, I index heads.
        up           [T, A * (nope + R) + I * D]  fp32
        rotations    [T, R]                       fp32
        nope         [T, A, nope]                 uint16, out, lifted
        query        [T, A, L + R]                uint16, out: its last R channels
        index_query  [T, I, D]                    uint16, out

    Raises:
        DuckShapeError: shape, dtype or layout; R or D is no power of two.
    """
    num_rows, rope = rotations.shape
    require("nope", nope, (num_rows, None, None), torch.uint16)
    require("index_query", index_query, (num_rows, None, None), torch.uint16)
    heads, nope_dim = nope.shape[1:]
    index_heads, dim = index_query.shape[1:]
    require_power_of_two("qk_rope_head_dim", rope)
    require_power_of_two("index_head_dim", dim)
    require("query", query, (num_rows, heads, None), torch.uint16)
    size = heads * (nope_dim + rope) + index_heads * dim
    require("up", up, (num_rows, size), torch.float32)
    require("rotations", rotations, (num_rows, rope), torch.float32)
    start(
        _split_up,
        (num_rows, heads + index_heads),
        up,
        rotations,
        nope,
        query,
        index_query,
        tile=tile,
        HEADS=heads,
        NOPE=nope_dim,
        NOPE_BLOCK=triton.next_power_of_2(nope_dim),
        L=query.shape[2] - rope,
        R=rope,
        INDEX_HEADS=index_heads,
        D=dim,
        OUT_SCALE=LIFT,
    )


def require_caches(caches: Caches, latent: int, rope: int, index_dim: int) -> None:
    """
    Raises:
        DuckShapeError: rows of another length than those of e4m3, or another layout.
        DuckConfigError: e4m3 has no such rows.
    """
    latent_row = LatentFormat(latent, rope, "fp8").token_bytes
    index_row = IndexFormat(index_dim, "fp8").token_bytes
    require("latent cache", caches.latent, (None, latent_row), torch.uint8)
    require("index cache", caches.index, (None, index_row), torch.uint8)
