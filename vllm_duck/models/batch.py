"""The tokens of one step, or of one lane of it: where each is cached, what it sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True)
class RequestRows:
    """The rows of one request in a batch: consecutive tokens of its sequence."""

    num_rows: int
    # Positions that its first row sees: 0 .. first_visible - 1; each next row sees
    # one more.
    first_visible: int


@dataclass(frozen=True)
class AttentionBatch:
    """Requests one after the other, each with its rows; plain data.

    Shapes: T tokens, B requests, N blocks of the longest request.
        slots        [T]     int64  cache slot of each token's own keys; -1 = nowhere
        block_table  [B, N]  int32  cache blocks of each request, in order
    """

    requests: tuple[RequestRows, ...]
    slots: npt.NDArray[np.int64]
    block_table: npt.NDArray[np.int32]
    block_size: int

    def __post_init__(self) -> None:
        assert len(self.slots) == sum(request.num_rows for request in self.requests)
        assert len(self.block_table) == len(self.requests)

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @property
    def num_visible(self) -> npt.NDArray[np.int64]:
        """Of each row, the positions that it sees, [T]."""
        rows = [np.arange(r.num_rows) + r.first_visible for r in self.requests]
        return np.concatenate([np.empty(0, np.int64), *rows])

    def lane(self, begin: Sequence[int], end: Sequence[int]) -> "AttentionBatch":
        """Rows begin[i] to end[i] of each request i, request by request.

        A request may have no row in the lane.
        """
        requests: list[RequestRows] = []
        kept: list[int] = []
        rows: list[int] = []
        row = 0
        for i, request in enumerate(self.requests):
            num_rows = end[i] - begin[i]
            if num_rows > 0:
                assert begin[i] >= 0
                assert end[i] <= request.num_rows
                first_visible = request.first_visible + begin[i]
                requests.append(RequestRows(num_rows, first_visible))
                kept.append(i)
                rows.extend(range(row + begin[i], row + end[i]))
            row += request.num_rows
        return AttentionBatch(
            tuple(requests), self.slots[rows], self.block_table[kept], self.block_size
        )


def in_memory(tensor: Tensor) -> npt.NDArray[Any]:
    """The values of a tensor of vLLM's in this machine's memory.

    On a CPU the tensor's own; from a device it is a copy, and waits for it.
    """
    return tensor.cpu().numpy()


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
    """Describe vLLM's step.

    Shapes: B requests, T tokens.
        query_start_loc  [B + 1]  int32
        seq_lens         [B]      tokens of each request, this step's included
        block_table      [B, N]   int32, blocks of each request
        slot_mapping     [T]      int64
    """
    starts = query_start_loc[: num_reqs + 1].tolist()
    lens = seq_lens[:num_reqs].tolist()
    requests = tuple(
        RequestRows(end - start, length - (end - start) + 1)
        for start, end, length in zip(starts[:-1], starts[1:], lens, strict=True)
    )
    return AttentionBatch(
        requests,
        in_memory(slot_mapping[:num_tokens]),
        in_memory(block_table[:num_reqs]),
        block_size,
    )


# A profiling run has no caches: all of its rows are padding.
NO_TOKENS = AttentionBatch((), np.empty(0, np.int64), np.empty((0, 1), np.int32), 1)
