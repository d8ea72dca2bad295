"""The end of a layer and the norm before a block: one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_duck.models.cuda.kernels.formats import (
    LIFT,
    bf16_bits,
    load_bf16,
    round_bf16,
)
from vllm_duck.models.cuda.kernels.launch import require, start
from vllm_duck.models.cuda.kernels.tiles import NORM, Tile


@triton.jit
def _join_norm(
    rows,
    shared,
    routed,
    weight,
    joined,
    normed,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    IS_JOIN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    x = load_bf16(rows + row + at, mask=mask)
    if IS_JOIN:
        added = tl.load(shared + row + at, mask=mask, other=0.0)
        added += tl.load(routed + row + at, mask=mask, other=0.0)
        x = round_bf16(x + added)
        tl.store(joined + row + at, bf16_bits(x), mask=mask)
    mean = tl.div_rn(tl.sum(x * x, 0), SIZE * 1.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + EPS))
    x = x * scale * tl.load(weight + at, mask=mask, other=0.0)
    tl.store(normed + row + at, bf16_bits(x * SCALE), mask=mask)


def norm(
    rows: Tensor,
    weight: Tensor,
    normed: Tensor,
    *,
    eps: float,
    is_lifted: bool,
    tile: Tile = NORM,
) -> None:
    """RMS norm: rows [T, H] bf16 bits -> normed [T, H], weight [H] fp32.

    is_lifted: for a matrix; else plain bf16.

    Raises:
        DuckShapeError: shape, dtype or layout.
    """
    _start(rows, None, weight, rows, normed, eps, is_lifted, tile)


def join_norm(
    rows: Tensor,
    shared: Tensor,
    routed: Tensor,
    weight: Tensor,
    joined: Tensor,
    normed: Tensor,
    *,
    eps: float,
    is_lifted: bool = True,
    tile: Tile = NORM,
) -> None:
    """joined = rows + (shared + routed), rounded once; normed = the next norm of it.

    rows, joined [T, H] bf16 bits (they may be the same memory); shared, routed [T, H]
    fp32: the shared expert and the ducks' sum, which may be pinned memory.

    Raises:
        DuckShapeError: shape, dtype or layout.
    """
    shape = tuple(rows.shape)
    for name, part in (("shared", shared), ("routed", routed)):
        require(name, part, shape, torch.float32)
    _start(rows, (shared, routed), weight, joined, normed, eps, is_lifted, tile)


def _start(
    rows: Tensor,
    added: tuple[Tensor, Tensor] | None,
    weight: Tensor,
    joined: Tensor,
    normed: Tensor,
    eps: float,
    is_lifted: bool,
    tile: Tile,
) -> None:
    require("rows", rows, (None, None), torch.uint16)
    num_rows, size = rows.shape
    require("weight", weight, (size,), torch.float32)
    for name, out in (("joined", joined), ("normed", normed)):
        require(name, out, (num_rows, size), torch.uint16)
    # Nobody reads the last two where nothing is added.
    shared, routed = added or (weight, weight)
    start(
        _join_norm,
        (num_rows,),
        rows,
        shared,
        routed,
        weight,
        joined,
        normed,
        tile=tile,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        EPS=eps,
        SCALE=LIFT if is_lifted else 1.0,
        IS_JOIN=added is not None,
    )
