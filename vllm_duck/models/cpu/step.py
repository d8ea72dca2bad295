"""A step's tokens as the kernels take them: planned once, for all layers."""

from itertools import accumulate

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vllm_duck.models.backend import RowIndex
from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.cpu import _host
from vllm_duck.models.cpu.threads import Handle

# [T, 1, qk_rope_head_dim / 2], one for each row, padding included.
Rotations = npt.NDArray[np.complex64]
# [T, index_topk] positions in rising order: what an indexer chose for each row that
# sees more than these. Other rows attend to all that they see; theirs are not set.
Choices = npt.NDArray[np.int32]


class CpuStep:
    """`models.backend.Step`.

    Of lanes in flight each has its own: what one layer chose is read by the next.
    """

    __slots__ = ("batch", "choices", "handle", "is_chosen", "rotations")

    def __init__(
        self,
        batch: AttentionBatch,
        rotations: Rotations,
        choices: Choices | None = None,
        *,
        is_chosen: bool = False,
    ) -> None:
        self.batch = batch
        self.rotations = rotations
        self.handle = _plan(batch)
        # None: no layer has kept any.
        self.choices = choices
        # Whether they are final: indexers of this step choose nothing.
        self.is_chosen = is_chosen

    @property
    def num_rows(self) -> int:
        return len(self.rotations)

    def lane(self, index: RowIndex, batch: AttentionBatch) -> "CpuStep":
        # Dense layers run before rows are cut into lanes; the first layer behind them
        # may read what the last of them chose.
        choices = None if self.choices is None else self.choices[index]
        return CpuStep(batch, self.rotations[index], choices, is_chosen=self.is_chosen)

    def behind(
        self, index: RowIndex, batch: AttentionBatch, rotations: Tensor
    ) -> "CpuStep":
        if self.choices is None:
            return CpuStep(batch, rotations.numpy())
        choices = self.choices[index]
        num_chosen = choices.shape[1]
        # Rows that saw no more chose all of it, and more is there to see by now.
        choices[self.batch.num_visible[index] <= num_chosen] = np.arange(num_chosen)
        return CpuStep(batch, rotations.numpy(), choices, is_chosen=True)

    def keep_choices(self, num_chosen: int) -> Choices:
        """Where layers keep what they choose; the same for all."""
        if self.choices is None:
            self.choices = np.empty((self.num_rows, num_chosen), np.int32)
        return self.choices


def _plan(batch: AttentionBatch) -> Handle:
    rows = accumulate((r.num_rows for r in batch.requests), initial=0)
    table = np.ascontiguousarray(batch.block_table, np.int32)
    return _host.step_new(
        num_requests=len(batch.requests),
        block_size=batch.block_size,
        row_begin=np.array(list(rows), np.int32),
        first_visible=np.array([r.first_visible for r in batch.requests], np.int32),
        slots=np.ascontiguousarray(batch.slots, np.int64),
        table=table,
        table_stride=table.shape[1],
    )
