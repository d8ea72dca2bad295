"""The rows of a step that the MTP layer sees: confirmed tokens, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_duck.models.batch import AttentionBatch, RequestRows, in_memory


@dataclass(frozen=True)
class ConfirmedRows:
    """Request by request; T rows, B requests.

    next_ids   [T]     token behind each row's own: what the layer embeds
    positions  [T]     int64
    hidden     [T, H]  the target's hidden states
    last       [B]     int64, each request's last row: it gives the draft
    batch      where the rows are cached, and what they see
    """

    next_ids: Tensor
    positions: Tensor
    hidden: Tensor
    last: Tensor
    batch: AttentionBatch


def confirmed_rows(
    *,
    token_ids: Tensor,
    positions: Tensor,
    hidden: Tensor,
    starts: Sequence[int],
    seq_lens: Sequence[int],
    num_rejected: Sequence[int],
    next_ids: Tensor,
    slots: Tensor,
    block_table: Tensor,
    block_size: int,
) -> ConfirmedRows:
    """Cut the rejected rows out of a step and shift its tokens by one.

    Shapes: S rows of the step, rejected ones included; B requests.
        token_ids, positions, slots  [S]
        hidden        [S, H]
        starts        B + 1 row indices: request i has rows starts[i] : starts[i + 1]
        seq_lens      B, tokens of each request with all rows of this step
        num_rejected  B, of each request's last rows
        next_ids      [B] the token behind each request's last confirmed one
    """
    requests: list[RequestRows] = []
    rows: list[int] = []
    last: list[int] = []
    for i, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        count = end - start - num_rejected[i]
        first_visible = seq_lens[i] - (end - start) + 1
        requests.append(RequestRows(count, first_visible))
        rows.extend(range(start, start + count))
        last.append(len(rows) - 1)
    if len(rows) < starts[-1]:
        kept = torch.tensor(rows)
        token_ids, positions = token_ids[kept], positions[kept]
        hidden, slots = hidden[kept], slots[kept]
    last_rows = torch.tensor(last)
    shifted = token_ids.roll(-1)
    shifted[last_rows] = next_ids.to(shifted.dtype)
    batch = AttentionBatch(
        tuple(requests), in_memory(slots), in_memory(block_table), block_size
    )
    return ConfirmedRows(shifted, positions, hidden, last_rows, batch)
