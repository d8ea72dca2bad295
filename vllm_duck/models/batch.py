"""The tokens of one step, or of one lane of it: where each is cached, what it sees."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from torch import Tensor
from vllm.forward_context import get_forward_context

from vllm_duck.models import _host
from vllm_duck.models.host import Handle


@dataclass(frozen=True)
class RequestRows:
    """The rows of one request in a batch: consecutive tokens of its sequence."""

    num_rows: int
    # Positions that its first row sees: 0 .. first_visible - 1; each next row sees
    # one more.
    first_visible: int


@dataclass(frozen=True)
class AttentionBatch:
    """Requests one after the other, each with its rows; one plan for all layers.

    Shapes: T tokens, B requests, N blocks of the longest request.
        slots        [T]     int64  cache slot of each token's own keys; -1 = nowhere
        block_table  [B, N]  int32  cache blocks of each request, in order
    """

    requests: tuple[RequestRows, ...]
    slots: npt.NDArray[np.int64]
    block_table: npt.NDArray[np.int32]
    block_size: int
    handle: Handle = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = accumulate((r.num_rows for r in self.requests), initial=0)
        row_begin = np.array(list(rows), np.int32)
        first_visible = np.array([r.first_visible for r in self.requests], np.int32)
        assert self.slots.shape[0] == row_begin[-1]
        assert self.block_table.shape[0] == len(self.requests)
        table = np.ascontiguousarray(self.block_table, np.int32)
        handle = _host.step_new(
            len(self.requests),
            self.block_size,
            row_begin,
            first_visible,
            np.ascontiguousarray(self.slots, np.int64),
            table,
            table.shape[1],
        )
        object.__setattr__(self, "handle", handle)

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    def lane(self, begin: Sequence[int], end: Sequence[int]) -> "AttentionBatch":
        """Of each request its rows [begin, end); may be none of them.

        The lane's tokens are those rows, request by request.
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
        query_start_loc  [B + 1]  int32, CPU
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
        slot_mapping[:num_tokens].numpy(),
        block_table[:num_reqs].numpy(),
        block_size,
    )


# A profiling run has no caches: all of its rows are padding.
NO_TOKENS = AttentionBatch((), np.empty(0, np.int64), np.empty((0, 1), np.int32), 1)


def current_batch(prefix: str) -> AttentionBatch:
    """The batch that vLLM's runner gave the layer with that latent cache."""
    metadata = get_forward_context().attn_metadata
    return NO_TOKENS if metadata is None else metadata[prefix]
