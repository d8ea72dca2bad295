"""The host before a fleet: lanes, schedule and native stream as they are, and a stage
0 that is paced as a GPU's, during which the thread is free."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from benchmarks.fleet.ducks import HIDDEN_SIZE, NUM_EXPERTS, NUM_LAYERS
from vllm_duck.executor.duck import Ducks, InFlight, MoeRequest, MoeSum
from vllm_duck.models.backend import LayerOutput, RowIndex
from vllm_duck.models.batch import AttentionBatch, RequestRows
from vllm_duck.spec_decode.lanes.policy import LanePolicy
from vllm_duck.spec_decode.lanes.run import Lanes
from vllm_duck.spec_decode.lanes.times import StepRecord

Bits = npt.NDArray[np.uint16]
NUM_TOPK = 8
# As long as nothing is ready, the thread sleeps so long at a time.
_NAP_S = 20e-6


@dataclass
class SocketWork:
    """CPU seconds of the main thread with the sockets, by what it did."""

    send_s: float = 0.0
    poll_s: float = 0.0
    take_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.send_s + self.poll_s + self.take_s

    def over(self, count: int) -> "SocketWork":
        """On the average of so many."""
        parts = (self.send_s, self.poll_s, self.take_s)
        return SocketWork(*(seconds / count for seconds in parts))


@dataclass
class Gpu:
    """One stage 0 after the other, each for so many seconds."""

    stage_s: float = 0.0
    _free_s: float = 0.0

    def ready_at(self) -> float:
        """When a stage 0 that is begun now will have ended."""
        self._free_s = max(self._free_s, time.perf_counter()) + self.stage_s
        return self._free_s


@dataclass(frozen=True)
class PacedStep:
    """`models.backend.Step`."""

    batch: AttentionBatch

    @property
    def num_rows(self) -> int:
        return self.batch.num_tokens

    def lane(self, index: RowIndex, batch: AttentionBatch) -> "PacedStep":
        return PacedStep(batch)

    @cached_property
    def topk(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        count = np.arange(self.num_rows * NUM_TOPK, dtype=np.int32)
        ids = (count % NUM_EXPERTS).reshape(-1, NUM_TOPK)
        return ids, np.ones(ids.shape, np.float32)


class PacedBackend:
    """What the lanes ask of `models.backend.HostBackend`."""

    def take(self, rows: Bits, index: RowIndex) -> Bits:
        return rows[index]

    def concat(self, parts: Sequence[Bits]) -> Bits:
        return np.concatenate(parts)


@dataclass
class PacedLayer:
    """What the lanes ask of `models.backend.Layer`."""

    layer_idx: int
    host: "Host"

    def stage0(self, rows: Bits, step: PacedStep) -> "PacedPending":
        request = MoeRequest(self.layer_idx, rows, *step.topk)
        return PacedPending(self.host, request, self.host.gpu.ready_at())


@dataclass
class PacedPending:
    """`models.backend.PendingLayer`: its rows are sent once the GPU has them."""

    host: "Host"
    request: MoeRequest
    ready_s: float
    sum: InFlight[MoeSum] | None = None

    def is_sent(self) -> bool:
        if self.sum is None:
            left_s = self.ready_s - time.perf_counter()
            if left_s > 0:
                time.sleep(min(left_s, _NAP_S))
                return False
            before_s = time.thread_time()
            self.sum = self.host.ducks.send(self.request)
            self.host.work.send_s += time.thread_time() - before_s
        return True

    def is_done(self) -> bool:
        if self.sum is None:
            return False
        before_s = time.thread_time()
        is_done = self.sum.is_done()
        self.host.work.poll_s += time.thread_time() - before_s
        return is_done

    def wait(self) -> LayerOutput:
        while not self.is_sent():
            pass
        assert self.sum is not None
        before_s = time.thread_time()
        _, times = self.sum.wait()
        self.host.work.take_s += time.thread_time() - before_s
        return LayerOutput(self.request.hidden, times)


@dataclass
class Host:
    """A host of so many layers; a step goes through all of them."""

    ducks: Ducks
    gpu: Gpu = field(default_factory=Gpu)
    work: SocketWork = field(default_factory=SocketWork)

    def __post_init__(self) -> None:
        self._layers = [PacedLayer(index, self) for index in range(NUM_LAYERS)]

    def step(self, num_rows: int) -> StepRecord:
        """Of one request, in lanes."""
        lanes = Lanes(PacedBackend(), LanePolicy(overlaps=True, times=None))  # type: ignore
        lanes.meter.num_wanted = 1
        rows = np.zeros((num_rows, HIDDEN_SIZE), np.uint16)
        lanes(self._layers, rows, _one_request(num_rows))  # type: ignore
        return lanes.meter.records[0]


def one_row() -> MoeRequest:
    """A lane's row of a pair."""
    hidden = np.zeros((1, HIDDEN_SIZE), np.uint16)
    return MoeRequest(0, hidden, *_one_request(1).topk)


def _one_request(num_rows: int) -> PacedStep:
    requests = (RequestRows(num_rows, 1),)
    slots = np.arange(num_rows, dtype=np.int64)
    return PacedStep(AttentionBatch(requests, slots, np.zeros((1, 1), np.int32), 16))
