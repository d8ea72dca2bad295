"""Chooses each token's experts, and hands the request to this machine.

The router's weights are fp32: in registers each becomes three bf16 numbers that add up
to it, as the C++ host has them. Sums over hidden come in parts of fixed size, which are
added in rising order. From the logits on, all bits are those of host/kernels/router.h.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_duck.models.cuda.kernels.formats import (
    LIFT,
    bf16_bits,
    bits_operand,
    dot,
    exp_clamped,
    load_bf16,
    operand_value,
    rounded_operand,
)
from vllm_duck.models.cuda.kernels.launch import require, start
from vllm_duck.models.cuda.kernels.rows import load_sum
from vllm_duck.models.cuda.kernels.tiles import (
    ROUTE,
    ROUTER_LOGITS,
    Tile,
    rows_tile,
)


@triton.jit(do_not_specialize=["num_rows"])
def _logits(
    x,
    weight,
    out,
    num_rows,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    SUM_SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split, k = tl.program_id(2), tl.arange(0, 64)
    is_row, is_expert = (row < num_rows)[:, None], (expert < EXPERTS)[:, None]
    TILES: tl.constexpr = (HIDDEN + 63) // 64
    SHARE: tl.constexpr = (TILES + SPLITS - 1) // SPLITS
    first = split * SHARE
    x_at = x + row[:, None].to(tl.int64) * HIDDEN
    w_at = weight + expert[:, None] * HIDDEN
    top = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    middle = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    rest = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(first, tl.minimum(first + SHARE, TILES)):
        at = (tile * 64 + k)[None, :]
        x_mask, w_mask = is_row, is_expert
        if HIDDEN % 64 != 0:
            x_mask, w_mask = x_mask & (at < HIDDEN), w_mask & (at < HIDDEN)
        rows = bits_operand(tl.load(x_at + at, mask=x_mask, other=0))
        w = tl.load(w_at + at, mask=w_mask, other=0.0)
        w0 = rounded_operand(w)
        w = w - operand_value(w0)
        w1 = rounded_operand(w)
        w2 = rounded_operand(w - operand_value(w1))
        top = dot(rows, tl.trans(w0), top)
        middle = dot(rows, tl.trans(w1), middle)
        rest = dot(rows, tl.trans(w2), rest)
    total = (top + (middle + rest)) * SUM_SCALE
    out += split.to(tl.int64) * num_rows * EXPERTS
    out_at = out + row[:, None] * EXPERTS + expert[None, :]
    tl.store(out_at, total, mask=is_row & (expert < EXPERTS)[None, :])


@triton.jit
def _mask_groups(biased, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """biased [groups, experts of one]: -inf in all but the best groups."""
    never = float("-inf")
    GROUP_BLOCK: tl.constexpr = biased.shape[0]
    SIZE_BLOCK: tl.constexpr = biased.shape[1]
    first = tl.max(biased, 1)
    place = tl.argmax(biased, 1)
    is_first = tl.arange(0, SIZE_BLOCK)[None, :] == place[:, None]
    second = tl.max(tl.where(is_first, never, biased), 1)
    group = tl.arange(0, GROUP_BLOCK)
    scores = tl.where(group < GROUPS, first + second, never)
    for _ in tl.static_range(TOP_GROUPS):
        scores = tl.where(group == tl.argmax(scores, 0), never, scores)
    return tl.where((scores != never)[:, None], never, biased)


@triton.jit
def _choose_row(
    logits,
    bias,
    ids,
    weights,
    stride,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    FACTOR: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    SIZE: tl.constexpr = EXPERTS // GROUPS
    never = float("-inf")
    group, place = tl.arange(0, GROUP_BLOCK), tl.arange(0, SIZE_BLOCK)
    expert = group[:, None] * SIZE + place[None, :]
    is_expert = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    logit = load_sum(logits, expert, is_expert, stride, SPLITS)
    scores = tl.div_rn(1.0, 1.0 + exp_clamped(-logit))
    biased = scores + tl.load(bias + expert, mask=is_expert, other=0.0)
    biased = tl.where(is_expert, biased, never)
    if TOP_GROUPS < GROUPS:
        biased = _mask_groups(biased, GROUPS, TOP_GROUPS)
    biased = tl.reshape(biased, [GROUP_BLOCK * SIZE_BLOCK])
    scores = tl.reshape(scores, [GROUP_BLOCK * SIZE_BLOCK])
    flat, rank = tl.arange(0, GROUP_BLOCK * SIZE_BLOCK), tl.arange(0, TOP_BLOCK)
    chosen = tl.zeros([TOP_BLOCK], tl.int32)
    picked = tl.zeros([TOP_BLOCK], tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for k in tl.static_range(TOP):
        # Of equal scores the lower id wins.
        best = tl.argmax(biased, 0)
        score = tl.sum(tl.where(flat == best, scores, 0.0), 0)
        biased = tl.where(flat == best, never, biased)
        best = best // SIZE_BLOCK * SIZE + best % SIZE_BLOCK
        chosen = tl.where(rank == k, best, chosen)
        picked = tl.where(rank == k, score, picked)
        total += score
    if IS_NORMALISED:
        picked = tl.div_rn(picked, total + 1e-20)
    tl.store(ids + rank, chosen, mask=rank < TOP)
    tl.store(weights + rank, picked * FACTOR, mask=rank < TOP)


@triton.jit
def _send_row(x, out, SIZE: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """A lifted row as plain bf16."""
    for first in tl.static_range(0, SIZE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        plain = load_bf16(x + at, mask=at < SIZE) * SCALE
        tl.store(out + at, bf16_bits(plain), mask=at < SIZE)


@triton.jit
def _raise_flag(arrivals, sequence, flag):
    """The last row's program raises the flag, behind what all of them have written."""
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="sys")
    if before == tl.num_programs(0) - 1:
        tl.store(arrivals, 0)
        value = tl.load(sequence) + 1
        tl.store(sequence, value)
        tl.debug_barrier()
        tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit(do_not_specialize=["num_rows"])
def _request(
    x,
    logits,
    bias,
    hidden,
    ids,
    weights,
    arrivals,
    sequence,
    flag,
    num_rows,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    FACTOR: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _choose_row(
        logits + row * EXPERTS,
        bias,
        ids + row * TOP,
        weights + row * TOP,
        num_rows.to(tl.int64) * EXPERTS,
        EXPERTS,
        GROUPS,
        TOP_GROUPS,
        TOP,
        TOP_BLOCK,
        IS_NORMALISED,
        FACTOR,
        SPLITS,
        GROUP_BLOCK,
        SIZE_BLOCK,
    )
    _send_row(x + row * HIDDEN, hidden + row * HIDDEN, HIDDEN, SCALE, BLOCK)
    _raise_flag(arrivals, sequence, flag)


@dataclass(frozen=True)
class Choice:
    """How experts are chosen; names are those of config.json."""

    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


@dataclass(frozen=True)
class Request:
    """A lane's request, for the host to send.

    Shapes: T rows, H hidden size, A experts per token. Pinned memory, but arrivals and
    sequence, which are the device's; those two and the flag are 0 at first.
        hidden    [T, H]  uint16
        ids       [T, A]  int32
        weights   [T, A]  fp32
        flag      [1]     int64, one more for each request
        sequence  [1]     int64, what the flag was raised to last
        arrivals  [1]     int32, how many rows are written
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    flag: Tensor
    sequence: Tensor
    arrivals: Tensor


def router_logits(
    x: Tensor, weight: Tensor, out: Tensor, *, tile: Tile = ROUTER_LOGITS
) -> None:
    """x [T, H] uint16, lifted; weight [E, H] fp32; out [S, T, E] fp32: S parts of sums.

    Raises:
        DuckShapeError: shape, dtype or layout.
    """
    require("x", x, (None, None), torch.uint16)
    num_rows, hidden = x.shape
    require("weight", weight, (None, hidden), torch.float32)
    experts = weight.shape[0]
    require("out", out, (None, num_rows, experts), torch.float32)
    block_m, splits = rows_tile(num_rows), out.shape[0]
    start(
        _logits,
        (triton.cdiv(num_rows, block_m), triton.cdiv(experts, tile.block), splits),
        x,
        weight,
        out,
        num_rows,
        tile=tile,
        EXPERTS=experts,
        HIDDEN=hidden,
        SUM_SCALE=1 / LIFT,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=tile.block,
    )


def send_request(
    x: Tensor,
    logits: Tensor,
    bias: Tensor,
    choice: Choice,
    request: Request,
    *,
    tile: Tile = ROUTE,
) -> None:
    """Choose experts, write the request, and raise its flag once.

    x [T, H] uint16, lifted; logits [S, T, E], as of `router_logits`; bias [E]; fp32.
    Source: DeepSeek-V3 report, 2.1.2 and 3.2.2; inference/model.py::Gate.

    Raises:
        DuckShapeError: shape, dtype or layout.
    """
    require("x", x, (None, None), torch.uint16)
    num_rows, hidden = x.shape
    require("bias", bias, (None,), torch.float32)
    experts = bias.shape[0]
    require("logits", logits, (None, num_rows, experts), torch.float32)
    top = request.ids.shape[-1]
    require("request.hidden", request.hidden, (num_rows, hidden), torch.uint16)
    require("request.ids", request.ids, (num_rows, top), torch.int32)
    require("request.weights", request.weights, (num_rows, top), torch.float32)
    for name in ("flag", "sequence"):
        require(f"request.{name}", getattr(request, name), (1,), torch.int64)
    require("request.arrivals", request.arrivals, (1,), torch.int32)
    start(
        _request,
        (num_rows,),
        x,
        logits,
        bias,
        request.hidden,
        request.ids,
        request.weights,
        request.arrivals,
        request.sequence,
        request.flag,
        num_rows,
        tile=tile,
        HIDDEN=hidden,
        EXPERTS=experts,
        GROUPS=choice.n_group,
        TOP_GROUPS=choice.topk_group,
        TOP=top,
        TOP_BLOCK=triton.next_power_of_2(top),
        IS_NORMALISED=choice.norm_topk_prob,
        FACTOR=choice.routed_scaling_factor,
        SPLITS=logits.shape[0],
        GROUP_BLOCK=triton.next_power_of_2(choice.n_group),
        SIZE_BLOCK=triton.next_power_of_2(experts // choice.n_group),
        SCALE=1 / LIFT,
        BLOCK=tile.block,
    )
