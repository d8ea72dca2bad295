"""How a step's tokens are divided into two lanes, and what a lane carries.

A split is sound because of three things, pinned by tests:
- of each request the first lane holds the first rows, so no row looks for keys that a
  later lane writes;
- a request that reads cache blocks which another request writes in this very step (a
  prefix-cache hit on a request that was admitted with it) is wholly in the last lane,
  whose turn comes after all writes of the first and after its own;
- a row's bits do not depend on its company (`host`), so lanes change no token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.host import Bits
from vllm_duck.models.layer import DecoderLayer, PendingLayer
from vllm_duck.models.overlap import LaneTimes, OverlapMeter, StepRecord
from vllm_duck.models.rope import Rotations
from vllm_duck.models.schedule import run_lanes
from vllm_duck.models.two_ways import TwoWays

Rows = npt.NDArray[Any]

# Why a step that could be divided is not.
SLOWER = "lanes measured slower"


@dataclass
class LanePolicy:
    """Whether steps may run in lanes, and whether only where that is quicker."""

    overlaps: bool
    # In lanes or whole, by rows; None: always in lanes where a step can be divided.
    times: TwoWays | None = field(default_factory=TwoWays)

    def prefers_lanes(self, num_rows: int) -> bool:
        if self.times is None:
            return True
        trial = self.times.trial(num_rows)
        return self.times.is_first_better(num_rows) if trial is None else trial

    def observe(self, num_rows: int, record: StepRecord) -> None:
        """Learn from a step that could have run either way."""
        in_lanes = record.serial_reason is None
        if self.times is not None and (in_lanes or record.serial_reason == SLOWER):
            self.times.observe(num_rows, is_first=in_lanes, seconds=record.seconds)


@dataclass(frozen=True)
class Split:
    """Two lanes of a step: of each request its rows before and from the cut."""

    batches: tuple[AttentionBatch, AttentionBatch]
    # Rows of the first lane, then of the second; None if that is the order they have.
    order: npt.NDArray[np.int64] | None

    def part(self, rows: Rows) -> tuple[Rows, Rows]:
        """rows [T, ...] of the step -> of the first lane, of the second."""
        if self.order is not None:
            rows = rows[self.order]
        num_first = self.batches[0].num_tokens
        return rows[:num_first], rows[num_first:]

    def join(self, first: Rows, second: Rows) -> Rows:
        """The inverse of `part`."""
        joined = np.concatenate([first, second])
        if self.order is None:
            return joined
        rows = np.empty_like(joined)
        rows[self.order] = joined
        return rows


def split(batch: AttentionBatch, num_rows: int) -> Split | str:
    """Divide the step's tokens into halves; or say why they stay together.

    num_rows: of the step's tensors; more than the batch has if some are padding.
    """
    if num_rows != batch.num_tokens:
        return "padded step"
    if num_rows < 2:
        return "one token"
    cuts = _cuts(batch)
    counts = [request.num_rows for request in batch.requests]
    if not any(cuts):
        return "every request reads what another writes"
    lanes = batch.lane([0] * len(cuts), cuts), batch.lane(cuts, counts)
    return Split(lanes, _order(counts, cuts))


def _cuts(batch: AttentionBatch) -> list[int]:
    """Of each request the number of its rows in the first lane: half of all rows."""
    readers = _same_step_readers(batch)
    left = (batch.num_tokens + 1) // 2
    cuts = []
    for i, request in enumerate(batch.requests):
        cuts.append(0 if i in readers else min(request.num_rows, left))
        left -= cuts[-1]
    return cuts


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


def _order(counts: Sequence[int], cuts: Sequence[int]) -> npt.NDArray[np.int64] | None:
    first: list[int] = []
    second: list[int] = []
    row = 0
    for count, cut in zip(counts, cuts, strict=True):
        first += range(row, row + cut)
        second += range(row + cut, row + count)
        row += count
    order = first + second
    return None if order == list(range(row)) else np.array(order)


def run_in_lanes(
    layers: Sequence[DecoderLayer],
    hidden: Bits,
    rotations: Rotations,
    batch: AttentionBatch,
    *,
    policy: LanePolicy,
    meter: OverlapMeter,
) -> Bits:
    """hidden [T, H] bits through the layers, in two lanes if it pays.

    Serially it is one lane: the same functions, the same bits.
    """
    if not layers:
        return hidden
    halves = _split_by(policy, batch, len(hidden))
    if isinstance(halves, str):
        lane = LayerLane(layers, hidden, rotations, batch, LaneTimes())
        run_lanes([lane], len(layers))
        record = StepRecord((lane.times,), halves)
        meter.add(record)
        policy.observe(len(hidden), record)
        return lane.hidden
    first, second = (
        LayerLane(layers, *parts, LaneTimes())
        for parts in zip(
            halves.part(hidden), halves.part(rotations), halves.batches, strict=True
        )
    )
    run_lanes([first, second], len(layers))
    record = StepRecord((first.times, second.times), None)
    meter.add(record)
    policy.observe(len(hidden), record)
    return halves.join(first.hidden, second.hidden)


def _split_by(policy: LanePolicy, batch: AttentionBatch, num_rows: int) -> Split | str:
    if not policy.overlaps:
        return "overlap is off"
    halves = split(batch, num_rows)
    if isinstance(halves, Split) and not policy.prefers_lanes(num_rows):
        return SLOWER
    return halves


class LayerLane:
    """A lane of a step in some layers: `schedule.Lane`."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        hidden: Bits,
        rotations: Rotations,
        batch: AttentionBatch,
        times: LaneTimes,
    ) -> None:
        self._layers = layers
        self.hidden = hidden
        self._rotations = rotations
        self._batch = batch
        self.times = times
        self._pending: PendingLayer

    def start(self, layer: int) -> None:
        self.times.begin_host()
        self._pending = self._layers[layer].start(
            self.hidden, self._rotations, self._batch
        )
        self.times.end_host()

    def is_done(self) -> bool:
        return self._pending.is_done()

    def finish(self) -> None:
        self.times.begin_wait()
        self.hidden = self._pending.result()
        self.times.end_wait(self._pending.times())
