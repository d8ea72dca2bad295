"""Rows times matrices, of e4m3 codes or bf16: one kernel for every linear of a layer.

An element is one chain: for each 128 of K a fresh dot product, times its block's scale,
added in rising K. Rows are padded to tiles of 16 or 32, so the chain does not know how
many there are.
"""

from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_duck.errors import DuckShapeError
from vllm_duck.models.cuda.kernels.formats import (
    LIFT,
    bf16_bits,
    bits_operand,
    dot,
    lifted_bits,
    load_bf16,
    pair_operands,
    silu,
)
from vllm_duck.models.cuda.kernels.launch import require, require_rows, start
from vllm_duck.models.cuda.kernels.packing import PackedWeight
from vllm_duck.models.cuda.kernels.tiles import (
    GEMM_HEADS,
    Tile,
    gemm_tile,
    rows_tile,
)


class Out(Enum):
    """What becomes of the sums."""

    # fp32, as accumulated.
    WIDE = 0
    # bf16(sum).
    BF16 = 1
    # bf16(sum) for another matrix.
    LIFTED = 2
    # bf16(residual + sum).
    RESIDUAL = 3
    # bf16(silu(gate) * up) for another matrix; the weight is gate above up.
    GATED = 4


@triton.jit
def _weight_operands(weight, tile, k, mask, IS_CODED: tl.constexpr):
    """Columns' numbers k and k + 64 of a tile; weight: where their rows begin."""
    if IS_CODED:
        pair = tl.load(weight[:, None] + tile * 64 + k[None, :], mask=mask, other=0)
        low, high = pair_operands(pair)
    else:
        at = weight[:, None] + tile * 128 + k[None, :]
        low = bits_operand(tl.load(at, mask=mask, other=0))
        high = bits_operand(tl.load(at + 64, mask=mask, other=0))
    return tl.trans(low), tl.trans(high)


@triton.jit
def _row_operand(x, k, is_row, K: tl.constexpr, IS_PLAIN: tl.constexpr):
    mask = is_row
    if K % 128 != 0:
        mask = mask & (k < K)[None, :]
    bits = tl.load(x + k[None, :], mask=mask, other=0)
    if IS_PLAIN:
        bits = lifted_bits(bits)
    return bits_operand(bits)


@triton.jit
def _add_tile(acc, low, high, weights, scales, is_column, IS_CODED: tl.constexpr):
    part = dot(low, weights[0], tl.zeros(acc.shape, tl.float32))
    part = dot(high, weights[1], part)
    if IS_CODED:
        part = part * tl.load(scales, mask=is_column, other=0.0)[None, :]
    return acc + part


@triton.jit(do_not_specialize=["num_rows"])
def _gemm(
    x,
    weight,
    scales,
    residual,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    OUT_ROW: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    SUM_SCALE: tl.constexpr,
    OUT_SCALE: tl.constexpr,
    IS_CODED: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Rows first: programs that run together read the same weights.
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = (row < num_rows)[:, None], column < N
    TILES: tl.constexpr = (K + 127) // 128
    ROWS: tl.constexpr = N * 2 if IS_GATED else N
    ROW_SIZE: tl.constexpr = TILES * (64 if IS_CODED else 128)
    GROUPS: tl.constexpr = (ROWS + GROUP - 1) // GROUP
    if SPLITS == 1:
        head, first, last = tl.program_id(2), 0, TILES
        x += head * X_HEAD
        weight += head.to(tl.int64) * (ROWS * ROW_SIZE)
        scales += head * (GROUPS * TILES)
        out += head * OUT_HEAD
    else:
        split = tl.program_id(2)
        first = split * ((TILES + SPLITS - 1) // SPLITS)
        last = tl.minimum(first + (TILES + SPLITS - 1) // SPLITS, TILES)
        out += split.to(tl.int64) * num_rows * OUT_ROW
    k = tl.arange(0, 64)
    x_at = x + row[:, None].to(tl.int64) * X_ROW
    w_at = weight + column.to(tl.int64) * ROW_SIZE
    s_at = scales + column // GROUP * TILES
    up_at = weight + (column + N).to(tl.int64) * ROW_SIZE
    up_s_at = scales + (column + N) // GROUP * TILES
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(first, last):
        low = _row_operand(x_at, tile * 128 + k, is_row, K, IS_PLAIN)
        high = _row_operand(x_at, tile * 128 + 64 + k, is_row, K, IS_PLAIN)
        weights = _weight_operands(w_at, tile, k, is_column[:, None], IS_CODED)
        acc = _add_tile(acc, low, high, weights, s_at + tile, is_column, IS_CODED)
        if IS_GATED:
            weights = _weight_operands(up_at, tile, k, is_column[:, None], IS_CODED)
            up = _add_tile(up, low, high, weights, up_s_at + tile, is_column, IS_CODED)
    at = row[:, None].to(tl.int64) * OUT_ROW + column[None, :]
    mask = is_row & is_column[None, :]
    acc = acc * SUM_SCALE
    if IS_GATED:
        acc = silu(acc) * (up * SUM_SCALE)
    if IS_RESIDUAL:
        acc += load_bf16(residual + at, mask=mask)
    if IS_WIDE:
        tl.store(out + at, acc, mask=mask)
    else:
        tl.store(out + at, bf16_bits(acc * OUT_SCALE), mask=mask)


def gemm(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    kind: Out,
    *,
    residual: Tensor | None = None,
    x_is_lifted: bool = True,
    tile: Tile | None = None,
) -> None:
    """out = x . weight^T, and what `kind` makes of it.

    Shapes: x [T, K] uint16, out [T, N] fp32 (WIDE) or uint16, half as wide as the
    weight if GATED; residual [T, N] uint16, may be the memory of out. Rows may be parts
    of wider ones. x_is_lifted=False: plain bf16, lifted here.

    Raises:
        DuckShapeError: shape, dtype or layout; no residual, or one that nobody adds.
    """
    if weight.heads != 1:
        raise DuckShapeError(f"weight must be one matrix, got {weight.heads} heads")
    num_rows, n = _check(x, weight, out, kind)
    if (residual is None) == (kind is Out.RESIDUAL):
        raise DuckShapeError(f"residual must be given for RESIDUAL alone, got {kind}")
    if residual is not None:
        require_rows("residual", residual, (num_rows, n), torch.uint16)
        if residual.stride(0) != out.stride(0):
            raise DuckShapeError(
                f"residual must have its rows as far apart as out, {out.stride(0)}, "
                f"got {residual.stride(0)}"
            )
    _start(x, weight, out, kind, residual, x_is_lifted, tile or gemm_tile(num_rows, n))


def gemm_heads(
    x: Tensor, weight: PackedWeight, out: Tensor, kind: Out, *, tile: Tile = GEMM_HEADS
) -> None:
    """Each head's rows times its own matrix.

    x [T, heads, K], out [T, heads, N] uint16; both may be parts of wider heads.

    Raises:
        DuckShapeError: shape, dtype or layout; another kind than BF16 and LIFTED.
    """
    if kind not in (Out.BF16, Out.LIFTED):
        raise DuckShapeError(f"heads must be BF16 or LIFTED, got {kind}")
    _check(x, weight, out, kind, weight.heads)
    _start(x, weight, out, kind, None, True, tile)


def gemm_splits(
    x: Tensor, weight: PackedWeight, out: Tensor, *, tile: Tile | None = None
) -> None:
    """A GEMM of few columns and a long K, in S parts that the next kernel adds.

    x [T, K] lifted; out [S, T, N] fp32, part s the sum over its share of K. S is a
    constant of the shape, so the additions are.

    Raises:
        DuckShapeError: shape, dtype or layout.
    """
    require("out", out, (None, x.shape[0], weight.n), torch.float32)
    _check(x, weight, out[0], Out.WIDE)
    tile = tile or gemm_tile(x.shape[0], weight.n)
    _start(x, weight, out[0], Out.WIDE, None, True, tile, out.shape[0])


def _check(
    x: Tensor, weight: PackedWeight, out: Tensor, kind: Out, *heads: int
) -> tuple[int, int]:
    """Returns T and N, as of out."""
    num_rows = x.shape[0]
    n = weight.n // 2 if kind is Out.GATED else weight.n
    require_rows("x", x, (num_rows, *heads, weight.k), torch.uint16)
    dtype = torch.float32 if kind is Out.WIDE else torch.uint16
    require_rows("out", out, (num_rows, *heads, n), dtype)
    if num_rows < 1:
        raise DuckShapeError("x must have a row, got none")
    return num_rows, n


def _start(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    kind: Out,
    residual: Tensor | None,
    x_is_lifted: bool,
    tile: Tile,
    num_splits: int = 1,
) -> None:
    num_rows, n = x.shape[0], out.shape[-1]
    is_coded = weight.scales is not None
    is_lifted_sum = x_is_lifted and not is_coded
    has_heads = x.dim() == 3
    block_m = rows_tile(num_rows)
    start(
        _gemm,
        (
            triton.cdiv(num_rows, block_m),
            triton.cdiv(n, tile.block),
            max(weight.heads, num_splits),
        ),
        x,
        weight.weight,
        # Nobody reads what is not there.
        weight.weight if weight.scales is None else weight.scales,
        x if residual is None else residual,
        out,
        num_rows,
        tile=tile,
        N=n,
        K=weight.k,
        GROUP=weight.group,
        X_ROW=x.stride(0),
        X_HEAD=x.stride(1) if has_heads else 0,
        OUT_ROW=out.stride(0),
        OUT_HEAD=out.stride(1) if has_heads else 0,
        SUM_SCALE=1 / LIFT if is_lifted_sum else 1.0,
        OUT_SCALE=LIFT if kind in (Out.LIFTED, Out.GATED) else 1.0,
        IS_CODED=is_coded,
        IS_PLAIN=is_coded and not x_is_lifted,
        IS_WIDE=kind is Out.WIDE,
        IS_RESIDUAL=kind is Out.RESIDUAL,
        IS_GATED=kind is Out.GATED,
        SPLITS=num_splits,
        BLOCK_M=block_m,
        BLOCK_N=tile.block,
    )
