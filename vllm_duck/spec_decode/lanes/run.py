"""Runs the layers that have ducks, in lanes where that is quicker."""

from collections.abc import Sequence
from typing import Any

from vllm_duck.models.backend import HostBackend, Layer, PendingLayer, Rows, Step
from vllm_duck.models.batch import AttentionBatch
from vllm_duck.spec_decode.lanes.policy import SLOWER, LanePolicy
from vllm_duck.spec_decode.lanes.schedule import run_lanes
from vllm_duck.spec_decode.lanes.split import Split, split
from vllm_duck.spec_decode.lanes.times import LaneTimes, OverlapMeter, StepRecord

NUM_LANES = 2


class Lanes:
    """The model's `LayerRunner`; owns the policy, and the sums of what steps took."""

    def __init__(
        self, backend: HostBackend, policy: LanePolicy, *, num_lanes: int = NUM_LANES
    ) -> None:
        self.policy = policy
        self.meter = OverlapMeter()
        self._backend = backend
        self._num_lanes = num_lanes

    def __call__(self, layers: Sequence[Layer], rows: Rows, step: Step) -> Rows:
        """rows through the layers, in lanes if it pays.

        Serially it is one lane: the same functions, the same bits.
        """
        if not layers:
            return rows
        num_rows = step.num_rows
        parts = self._split(step.batch, num_rows)
        if isinstance(parts, str):
            lane = LayerLane(layers, rows, step)
            self._run([lane], num_rows, len(layers), serial_reason=parts)
            return lane.rows
        lanes = self._lanes(layers, rows, step, parts)
        self._run(lanes, num_rows, len(layers), serial_reason=None)
        joined = self._backend.concat([lane.rows for lane in lanes])
        place = parts.place
        return joined if place is None else self._backend.take(joined, place)

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

    def _lanes(
        self, layers: Sequence[Layer], rows: Rows, step: Step, parts: Split
    ) -> list["LayerLane"]:
        backend = self._backend
        return [
            LayerLane(layers, backend.take(rows, index), step.lane(index, batch))
            for index, batch in zip(parts.lanes, parts.batches, strict=True)
        ]

    def _run(
        self,
        lanes: Sequence["LayerLane"],
        num_rows: int,
        num_layers: int,
        *,
        serial_reason: str | None,
    ) -> None:
        run_lanes(lanes, num_layers)
        record = StepRecord(tuple(lane.times for lane in lanes), serial_reason)
        self.meter.add(record)
        self.policy.observe(num_rows, record)


class LayerLane:
    """The rows of one lane on their way through the layers: a `schedule.Lane`."""

    def __init__(self, layers: Sequence[Layer], rows: Rows, step: Step) -> None:
        self._layers = layers
        self.rows = rows
        self._step = step
        self.times = LaneTimes()
        self._pending: PendingLayer

    def stage0(self, layer: int) -> None:
        self.times.begin_host()
        self._pending = self._layers[layer].stage0(self.rows, self._step)
        self.times.end_host()

    def is_sent(self) -> bool:
        return self._pending.is_sent()

    def is_done(self) -> bool:
        return self._pending.is_done()

    def stage1(self) -> None:
        self.times.begin_wait()
        self.rows, call = self._pending.wait()
        self.times.end_wait(call)
