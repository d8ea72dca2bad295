"""How the tokens of one step are grouped for attention: one plan for all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Requests with at most this many new tokens are decoded token by token, all in one
# group; longer ones are prompt chunks, whose tokens share one gathered context.
MAX_DECODE_TOKENS = 4
# Rows of a prompt chunk that are attended at once: bounds the logits' memory.
PROMPT_ROWS = 256
# Context positions (rows times padded length) of a decode group that are gathered
# at once: about 100 MB of keys in the official sizes.
DECODE_POSITIONS = 1 << 16


@dataclass(frozen=True)
class RowGroup:
    """Rows that are attended together.

    Shapes: R rows, S context positions (the longest row's), C = R or 1 contexts.
        rows        slice of the step's tokens, or int64 [R]
        visible     [R]     int64   positions that row r may see: 0 .. visible - 1
        slots       [C, S]  int64   cache slot of each context position; C = 1 when
                                    the rows share a context; past a row's visible
                                    length any valid slot
    """

    rows: slice | Tensor
    visible: Tensor
    slots: Tensor
    is_shared: bool


@dataclass(frozen=True)
class AttentionBatch:
    """One step: where its tokens are written, and how they are attended.

    slots  [T]  int64  cache slot that each of the step's tokens is written to
    """

    num_tokens: int
    slots: Tensor
    groups: tuple[RowGroup, ...]


def plan_batch(
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    num_reqs: int,
    num_tokens: int,
    block_size: int,
) -> AttentionBatch:
    """Group a step's tokens.

    Shapes: B requests, T tokens.
        query_start_loc  [B + 1]  int32, CPU
        seq_lens         [B]      tokens of each request, this step's included
        block_table      [B, N]   blocks of each request
        slot_mapping     [T]      int64
    """
    starts = query_start_loc[: num_reqs + 1].tolist()
    lens = seq_lens[:num_reqs].tolist()
    groups: list[RowGroup] = []
    decode_rows: list[int] = []
    decode_requests: list[int] = []
    decode_visible: list[int] = []
    for request, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        first_visible = lens[request] - (end - start) + 1
        if end - start <= MAX_DECODE_TOKENS:
            decode_rows.extend(range(start, end))
            decode_requests.extend([request] * (end - start))
            decode_visible.extend(range(first_visible, lens[request] + 1))
            continue
        table = block_table[request : request + 1]
        slots = _context_slots(table, lens[request], block_size)
        for lo in range(start, end, PROMPT_ROWS):
            hi = min(lo + PROMPT_ROWS, end)
            visible = torch.arange(lo, hi) + (first_visible - start)
            num_positions = first_visible + hi - 1 - start
            groups.append(
                RowGroup(slice(lo, hi), visible, slots[:, :num_positions], True)
            )
    order = sorted(range(len(decode_rows)), key=decode_visible.__getitem__)
    while order:
        longest = decode_visible[order[-1]]
        picked, order = _split_tail(order, max(1, DECODE_POSITIONS // longest))
        requests = torch.tensor([decode_requests[i] for i in picked])
        groups.append(
            RowGroup(
                torch.tensor([decode_rows[i] for i in picked]),
                torch.tensor([decode_visible[i] for i in picked]),
                _context_slots(block_table[requests], longest, block_size),
                False,
            )
        )
    return AttentionBatch(num_tokens, slot_mapping[:num_tokens], tuple(groups))


def _context_slots(block_table: Tensor, num_positions: int, block_size: int) -> Tensor:
    """block_table [C, N] -> the slots [C, S] of positions 0 .. S - 1."""
    num_blocks = -(-num_positions // block_size)
    first = block_table[:, :num_blocks].to(torch.int64) * block_size
    slots = first[:, :, None] + torch.arange(block_size, device=first.device)
    return slots.flatten(1)[:, :num_positions]


def _split_tail(order: list[int], count: int) -> tuple[list[int], list[int]]:
    return order[-count:], order[:-count]
