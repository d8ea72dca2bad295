"""A step's tokens as the kernels take them: planned once, for all layers."""

from itertools import accumulate

import numpy as np
import numpy.typing as npt

from vllm_duck.models.backend import RowIndex
from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.cpu import _host
from vllm_duck.models.cpu.threads import Handle

# [T, 1, qk_rope_head_dim / 2], one for each row, padding included.
Rotations = npt.NDArray[np.complex64]


class CpuStep:
    """`models.backend.Step`."""

    __slots__ = ("batch", "handle", "rotations")

    def __init__(self, batch: AttentionBatch, rotations: Rotations) -> None:
        self.batch = batch
        self.rotations = rotations
        self.handle = _plan(batch)

    @property
    def num_rows(self) -> int:
        return len(self.rotations)

    def lane(self, index: RowIndex, batch: AttentionBatch) -> "CpuStep":
        return CpuStep(batch, self.rotations[index])


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
