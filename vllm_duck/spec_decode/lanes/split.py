"""How a step's tokens are divided into lanes.

A split is sound because of three things, pinned by tests:
- the lanes hold a request's rows in order, so no row looks for keys that a later lane
  writes;
- a request that reads cache blocks which another request writes in this very step (a
  prefix-cache hit on a request that was admitted with it) is wholly in the last lane,
  whose turn comes after all writes of the others and after its own;
- a row's bits do not depend on its company, so lanes change no token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from vllm_duck.models.backend import RowIndex
from vllm_duck.models.batch import AttentionBatch


@dataclass(frozen=True)
class Split:
    """The lanes of a step: consecutive parts of each request's rows."""

    batches: tuple[AttentionBatch, ...]
    # Row indices, lane by lane; None if the rows are in that order already.
    order: npt.NDArray[np.int64] | None

    @property
    def lanes(self) -> list[RowIndex]:
        """The rows of each lane."""
        ends = list(accumulate(batch.num_tokens for batch in self.batches))
        lanes = [slice(lo, hi) for lo, hi in pairwise([0, *ends])]
        order = self.order
        return [lane if order is None else order[lane] for lane in lanes]

    @property
    def place(self) -> npt.NDArray[np.int64] | None:
        """The position of each row in the joined lanes; None if none moved."""
        return None if self.order is None else np.argsort(self.order)


def split(batch: AttentionBatch, num_rows: int, *, num_lanes: int) -> Split | str:
    """Divide the step's tokens into lanes of equal size, or say why not.

    num_rows: of the step's tensors; more than the batch has if some are padding.
    """
    if num_rows != batch.num_tokens:
        return "padded step"
    if num_rows < 2:
        return "one token"
    cuts = _cuts(batch, num_lanes)
    lanes = [batch.lane(begin, end) for begin, end in pairwise(cuts) if begin != end]
    if len(lanes) < 2:
        return "every request reads what another writes"
    return Split(tuple(lanes), _order(cuts))


def _cuts(batch: AttentionBatch, num_lanes: int) -> list[list[int]]:
    """[num_lanes + 1][B]: lane k has rows cuts[k][i] to cuts[k + 1][i] of request i."""
    readers = _same_step_readers(batch)
    counts = [request.num_rows for request in batch.requests]
    cuts = [[0] * len(counts)]
    num_placed = 0
    for k in range(1, num_lanes):
        # Rounded up: of an odd number the first lanes have more.
        left = -(-k * batch.num_tokens // num_lanes) - num_placed
        ends = list(cuts[-1])
        for i, count in enumerate(counts):
            if i not in readers:
                num_more = min(count - ends[i], left)
                ends[i] += num_more
                left -= num_more
                num_placed += num_more
        cuts.append(ends)
    return [*cuts, counts]


def _same_step_readers(batch: AttentionBatch) -> set[int]:
    """Requests whose earlier positions lie in blocks that others write in this step."""
    if len(batch.requests) < 2:
        return set()
    written_by: dict[int, int] = {}
    blocks = (batch.slots // batch.block_size).tolist()
    row = 0
    for i, request in enumerate(batch.requests):
        for block in blocks[row : row + request.num_rows]:
            written_by[block] = i
        row += request.num_rows
    written = np.array(list(written_by), np.int32)
    readers = set()
    for i, request in enumerate(batch.requests):
        # Before its first row, which sees itself.
        num_blocks = -(-(request.first_visible - 1) // batch.block_size)
        read = batch.block_table[i, :num_blocks]
        for block in read[np.isin(read, written)].tolist():
            if written_by[block] != i:
                readers.add(i)
    return readers


def _order(cuts: Sequence[Sequence[int]]) -> npt.NDArray[np.int64] | None:
    counts = cuts[-1]
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    order: list[int] = []
    for begin, end in pairwise(cuts):
        for start, first, last in zip(starts, begin, end, strict=True):
            order += range(start + first, start + last)
    return None if order == list(range(sum(counts))) else np.array(order)
