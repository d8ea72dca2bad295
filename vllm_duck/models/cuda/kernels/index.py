"""The indexer: scores over the paged cache, and the best positions of each row.

score(s) = scale(s) * sum over heads of w_h * relu(q_h . k_s). A row that sees at most
index_topk positions attends to all of them and needs no scores.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_duck.models.cuda.kernels.formats import (
    dot,
    e4m3_value,
    load_bf16,
    operand,
    ordered,
)
from vllm_duck.models.cuda.kernels.launch import (
    require,
    require_power_of_two,
    start,
)
from vllm_duck.models.cuda.kernels.tiles import INDEX_SCORES, SELECT, Tile


@triton.jit(do_not_specialize=["score_stride", "table_stride"])
def _scores(
    query,
    weights,
    cache,
    block_table,
    request_of,
    visible,
    scores,
    score_stride,
    table_stride,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * KEYS
    count = tl.load(visible + row)
    if first >= count or count <= TOPK:
        return
    at = first + tl.arange(0, KEYS)
    is_key = at < count
    table = block_table + tl.load(request_of + row).to(tl.int64) * table_stride
    page = tl.load(table + at // PAGE, mask=is_key, other=0).to(tl.int64)
    base = cache + (page * PAGE + at % PAGE) * (D + 4)
    # A cached row begins at a multiple of 4 bytes: a word is four codes, the first
    # lowest.
    word_at = base.to(tl.pointer_type(tl.uint32))[:, None] + tl.arange(0, D // 4)
    words = tl.load(word_at, mask=is_key[:, None], other=0)
    shifts = tl.arange(0, 4) * 8
    codes = (words[:, :, None] >> shifts[None, None, :]) & 0xFF
    keys = operand(e4m3_value(tl.reshape(codes, [KEYS, D])))
    scale_at = (base + D).to(tl.pointer_type(tl.float32))
    scale = tl.load(scale_at, mask=is_key, other=0.0)
    head = tl.arange(0, HEAD_BLOCK)
    is_head = head < HEADS
    heads_at = query + (row * HEADS + head[:, None]) * D + tl.arange(0, D)[None, :]
    heads = operand(load_bf16(heads_at, mask=is_head[:, None]))
    w = tl.load(weights + row * HEADS + head, mask=is_head, other=0.0)
    dots = dot(heads, tl.trans(keys), tl.zeros([HEAD_BLOCK, KEYS], tl.float32))
    score = tl.sum(tl.maximum(dots, 0.0) * w[:, None], 0) * scale
    tl.store(scores + row * score_stride + at, score, mask=is_key)


@triton.jit
def _keys(scores, at, count):
    return ordered(tl.load(scores + at, mask=at < count, other=0.0))


@triton.jit
def _threshold(scores, count, TOPK: tl.constexpr, CHUNK: tl.constexpr):
    """The key of the TOPK-th best score, and how many that equal it are too many.

    By its digits of 8 bits from the top: a histogram of those that agree so far.
    """
    least, need = tl.full([], 0, tl.uint32), tl.full([], TOPK, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    digits, lane = tl.arange(0, 256), tl.arange(0, CHUNK)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        histogram = tl.zeros([256], tl.int32)
        for first in range(0, count, CHUNK):
            key = _keys(scores, first + lane, count)
            agrees = first + lane < count
            if step > 0:
                agrees &= (key >> (shift + 8)) == (least >> (shift + 8))
            own = ((key >> shift) & 0xFF).to(tl.int32)
            histogram += tl.histogram(own, 256, mask=agrees)
        reach = tl.cumsum(histogram, 0, reverse=True)
        digit = tl.sum((reach >= need).to(tl.int32), 0) - 1
        need -= tl.sum(tl.where(digits > digit, histogram, 0), 0)
        num_equal = tl.sum(tl.where(digits == digit, histogram, 0), 0)
        least = least | (digit.to(tl.uint32) << shift)
    return least, num_equal - need


@triton.jit
def _take(slots, table, at, take, written, PAGE: tl.constexpr):
    """Write the slots of the positions taken behind those written before."""
    place = written + tl.cumsum(take.to(tl.int32), 0) - 1
    page = tl.load(table + at // PAGE, mask=take, other=0)
    tl.store(slots + place, page * PAGE + at % PAGE, mask=take)
    return written + tl.sum(take.to(tl.int32), 0)


@triton.jit(do_not_specialize=["score_stride", "table_stride"])
def _select(
    scores,
    visible,
    block_table,
    request_of,
    slots,
    counts,
    score_stride,
    table_stride,
    TOPK: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(visible + row)
    scores += row * score_stride
    slots += row * TOPK
    table = block_table + tl.load(request_of + row).to(tl.int64) * table_stride
    tl.store(counts + row, tl.minimum(count, TOPK))
    lane = tl.arange(0, CHUNK)
    written = tl.full([], 0, tl.int32)
    if count <= TOPK:
        for first in range(0, count, CHUNK):
            at = first + lane
            written = _take(slots, table, at, at < count, written, PAGE)
    else:
        least, excess = _threshold(scores, count, TOPK, CHUNK)
        seen = tl.full([], 0, tl.int32)
        for first in range(0, count, CHUNK):
            at = first + lane
            key = _keys(scores, at, count)
            # Of equal scores the first few are too many.
            is_equal = (at < count) & (key == least)
            rank = seen + tl.cumsum(is_equal.to(tl.int32), 0) - 1
            take = ((at < count) & (key > least)) | (is_equal & (rank >= excess))
            seen += tl.sum(is_equal.to(tl.int32), 0)
            written = _take(slots, table, at, take, written, PAGE)


@dataclass(frozen=True)
class Context:
    """What each of T rows sees, for R requests; all int32.

    Shapes: visible [T], the first positions of its request, 0 for padding;
    request_of [T]; block_table [R, blocks]. page: positions of a block.
    """

    visible: Tensor
    request_of: Tensor
    block_table: Tensor
    page: int


def index_scores(
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    context: Context,
    scores: Tensor,
    *,
    topk: int,
    tile: Tile = INDEX_SCORES,
) -> None:
    """Score what rows see that see more than topk positions; the rest stays as it is.

    Shapes: query [T, I, D] uint16, rotated; weights [T, I] fp32, scaled; cache [slots,
    D + 4] uint8; scores [T, most positions] fp32, out. The grid has its size: one graph
    serves every length.

    Raises:
        DuckShapeError: shape, dtype or layout.
    """
    require("query", query, (None, None, None), torch.uint16)
    num_rows, heads, dim = query.shape
    require_power_of_two("index_head_dim", dim)
    require("weights", weights, (num_rows, heads), torch.float32)
    require("index cache", cache, (None, dim + 4), torch.uint8)
    require("scores", scores, (num_rows, None), torch.float32)
    _require_context(context, num_rows)
    start(
        _scores,
        (num_rows, triton.cdiv(scores.shape[1], tile.block)),
        query,
        weights,
        cache,
        context.block_table,
        context.request_of,
        context.visible,
        scores,
        scores.shape[1],
        context.block_table.shape[1],
        tile=tile,
        HEADS=heads,
        # A dot product has 16 rows at least.
        HEAD_BLOCK=max(16, triton.next_power_of_2(heads)),
        D=dim,
        PAGE=context.page,
        TOPK=topk,
        KEYS=tile.block,
    )


def select(
    scores: Tensor,
    context: Context,
    slots: Tensor,
    counts: Tensor,
    *,
    tile: Tile = SELECT,
) -> None:
    """The topk best positions of each row, in rising order, as slots of the caches.

    Of equal scores the later position wins, as on the C++ host: the choice then depends
    on the scores alone. scores [T, most positions] fp32; slots [T, topk] int32, out;
    counts [T] int32, out: how many there are.

    Raises:
        DuckShapeError: shape, dtype or layout.
    """
    require("scores", scores, (None, None), torch.float32)
    num_rows = scores.shape[0]
    require("slots", slots, (num_rows, None), torch.int32)
    require("counts", counts, (num_rows,), torch.int32)
    _require_context(context, num_rows)
    start(
        _select,
        (num_rows,),
        scores,
        context.visible,
        context.block_table,
        context.request_of,
        slots,
        counts,
        scores.shape[1],
        context.block_table.shape[1],
        tile=tile,
        TOPK=slots.shape[1],
        PAGE=context.page,
        CHUNK=tile.block,
    )


def _require_context(context: Context, num_rows: int) -> None:
    require("visible", context.visible, (num_rows,), torch.int32)
    require("request_of", context.request_of, (num_rows,), torch.int32)
    require("block_table", context.block_table, (None, None), torch.int32)
