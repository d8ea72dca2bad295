"""The rows of deeper drafts: each request's last draft, behind its confirmed rows.

The MTP layer runs once per draft: first over the confirmed rows, and each further time
over a row per request, which takes the last draft and the hidden state that gave
it. The keys of these rows depend on drafts, so their slots are temporary: the confirmed
rows of the request's next step begin at the first of them and overwrite what the layer
will look at. Nothing has to be undone, and no slot outside a request's own is touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_duck.models.batch import AttentionBatch, RequestRows, in_memory
from vllm_duck.spec_decode.confirmed import ConfirmedRows


@dataclass(frozen=True)
class DeeperRows:
    """One row of each of the W requests that draft on.

    requests   [W]  int64, of the batch
    positions  [W]  int64
    batch      where the rows are cached, and what they see
    """

    requests: Tensor
    positions: Tensor
    batch: AttentionBatch


def deeper_rows(
    rows: ConfirmedRows, num_drafts: int, room: Sequence[int]
) -> DeeperRows | None:
    """Of the requests that have `num_drafts` drafts and room for a row; None: of none.

    room: for each request, the first position without a slot; 0 = it drafts no further.
    """
    positions = rows.positions[rows.last] + num_drafts
    fitting = [i for i, at in enumerate(positions.tolist()) if at < room[i]]
    if not fitting:
        return None
    requests = torch.tensor(fitting)
    positions = positions[requests]
    block_table = rows.batch.block_table[fitting]
    block_size = rows.batch.block_size
    at = in_memory(positions)
    blocks = block_table[np.arange(len(fitting)), at // block_size].astype(np.int64)
    batch = AttentionBatch(
        tuple(RequestRows(1, int(position) + 1) for position in at),
        blocks * block_size + at % block_size,
        block_table,
        block_size,
    )
    return DeeperRows(requests, positions, batch)
