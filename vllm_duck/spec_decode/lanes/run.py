"""Runs the layers that have ducks, in lanes where that is quicker."""

from collections.abc import Sequence
from typing import Any

from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.host import Bits
from vllm_duck.models.layer import DecoderLayer
from vllm_duck.models.rope import Rotations
from vllm_duck.models.stages import PendingLayer
from vllm_duck.spec_decode.lanes.policy import SLOWER, LanePolicy
from vllm_duck.spec_decode.lanes.schedule import run_lanes
from vllm_duck.spec_decode.lanes.split import Split, split
from vllm_duck.spec_decode.lanes.times import LaneTimes, OverlapMeter, StepRecord

NUM_LANES = 2


class Lanes:
    """The model's `LayerRunner`; owns the policy, and the sums of what steps took."""

    def __init__(self, policy: LanePolicy, *, num_lanes: int = NUM_LANES) -> None:
        self.policy = policy
        self.meter = OverlapMeter()
        self._num_lanes = num_lanes

    def __call__(
        self,
        layers: Sequence[DecoderLayer],
        hidden: Bits,
        rotations: Rotations,
        batch: AttentionBatch,
    ) -> Bits:
        """hidden [T, H] bits through the layers, in lanes if it pays.

        Serially it is one lane: the same functions, the same bits.
        """
        if not layers:
            return hidden
        parts = self._split(batch, len(hidden))
        if isinstance(parts, str):
            lane = LayerLane(layers, hidden, rotations, batch)
            self._run([lane], layers, len(hidden), serial_reason=parts)
            return lane.hidden
        lanes = [
            LayerLane(layers, *part)
            for part in zip(
                parts.part(hidden), parts.part(rotations), parts.batches, strict=True
            )
        ]
        self._run(lanes, layers, len(hidden), serial_reason=None)
        return parts.join([lane.hidden for lane in lanes])

    def figures(self) -> dict[str, Any]:
        """The sums over all steps, as plain values."""
        return self.meter.figures()

    def _split(self, batch: AttentionBatch, num_rows: int) -> Split | str:
        if not self.policy.overlaps:
            return "overlap is off"
        parts = split(batch, num_rows, num_lanes=self._num_lanes)
        if isinstance(parts, Split) and not self.policy.prefers_lanes(num_rows):
            return SLOWER
        return parts

    def _run(
        self,
        lanes: Sequence["LayerLane"],
        layers: Sequence[DecoderLayer],
        num_rows: int,
        *,
        serial_reason: str | None,
    ) -> None:
        run_lanes(lanes, len(layers))
        record = StepRecord(tuple(lane.times for lane in lanes), serial_reason)
        self.meter.add(record)
        self.policy.observe(num_rows, record)


class LayerLane:
    """The rows of one lane on their way through the layers: a `schedule.Lane`."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        hidden: Bits,
        rotations: Rotations,
        batch: AttentionBatch,
    ) -> None:
        self._layers = layers
        self.hidden = hidden
        self._rotations = rotations
        self._batch = batch
        self.times = LaneTimes()
        self._pending: PendingLayer

    def stage0(self, layer: int) -> None:
        self.times.begin_host()
        self._pending = self._layers[layer].stage0(
            self.hidden, self._rotations, self._batch
        )
        self.times.end_host()

    def is_sent(self) -> bool:
        return self._pending.is_sent()

    def is_done(self) -> bool:
        return self._pending.is_done()

    def stage1(self) -> None:
        self.times.begin_wait()
        self.hidden, call = self._pending.wait()
        self.times.end_wait(call)
