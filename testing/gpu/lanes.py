"""A small model on a fake GPU: two lanes over shared caches, and late ducks.

`serial_step` computes the same in plain numpy, one lane wholly before the next.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from testing.gpu.fake import Buffer, FakeGpu, Kernel
from vllm_duck.executor.duck import CallTimes, MoeRequest, MoeSum
from vllm_duck.models.cuda.stages import LaneMemory, PendingStage, StageRunner
from vllm_duck.spec_decode.lanes.schedule import run_lanes

NUM_LAYERS, MAX_ROWS, HIDDEN = 5, 4, 8
SCALES = np.linspace(0.3, 0.9, NUM_LAYERS, dtype=np.float32)


def attend(hidden: np.ndarray, keys: np.ndarray, layer: int, bias: float) -> None:
    """Both in place: a lane adds to the keys that those before it wrote."""
    keys += hidden.sum(axis=0) * np.float32(0.125)
    hidden += np.sin(keys * SCALES[layer]) + np.float32(bias)


def to_wire(hidden: np.ndarray) -> np.ndarray:
    return (hidden.view(np.uint32) >> 16).astype(np.uint16)


def answer(request: MoeRequest) -> np.ndarray:
    hidden = (request.hidden.astype(np.uint32) << 16).view(np.float32)
    gate = request.topk_weights * (1 + request.topk_ids)
    return np.tanh(hidden * (gate + request.layer_idx)).astype(np.float32)


class FakeStages:
    """The kernels of one lane; `residual` is the lane's own on the device."""

    def __init__(self, gpu: FakeGpu, caches: Sequence[Buffer], name: str) -> None:
        self.gpu, self.caches, self.name = gpu, caches, name
        self.residual = gpu.allocate(f"{name}.residual", (MAX_ROWS, HIDDEN))

    def moe(self, layer_idx: int, memory: LaneMemory[Any], num_rows: int) -> None:
        self._join(memory, num_rows, is_first=layer_idx == 0)
        cache = self.caches[layer_idx]

        def attention(metadata, keys_in, residual, keys):
            attend(residual[:num_rows], keys, layer_idx, metadata[0])

        self._start(
            attention, [memory.metadata, cache], [self.residual, cache], "attend"
        )

        def pack(residual, request, ids, weights):
            request[:num_rows] = to_wire(residual[:num_rows])
            ids[:num_rows], weights[:num_rows] = 1, 0.25

        writes = [memory.request, memory.topk_ids, memory.topk_weights]
        self._start(pack, [self.residual], writes, "pack", flag=memory.flag)
        # Behind the flag, as the shared expert.
        self._start(lambda _, residual: None, [self.residual], [self.residual], "rest")

    def leave(self, memory: LaneMemory[Any], num_rows: int) -> None:
        self._join(memory, num_rows, is_first=False)

        def copy(residual, hidden):
            hidden[:num_rows] = residual[:num_rows]

        self._start(copy, [self.residual], [memory.hidden], "leave", flag=memory.flag)

    def _join(self, memory: LaneMemory[Any], num_rows: int, *, is_first: bool) -> None:
        def begin(hidden, residual):
            residual[:num_rows] = hidden[:num_rows]

        def add(total, residual):
            residual[:num_rows] += total[:num_rows]

        function, source = (begin, memory.hidden) if is_first else (add, memory.total)
        self._start(function, [source], [self.residual], "join")

    def _start(self, function, reads, writes, name, flag=None) -> None:
        self.gpu.start(Kernel(f"{self.name}.{name}", reads, writes, function, flag))


class LateDucks:
    """Answer in order, each after some looks; an answer is of what was sent."""

    def __init__(self, looks) -> None:
        self._looks, self.requests = looks, []

    def send(self, request: MoeRequest) -> "LateAnswer":
        self.requests.append(request.layer_idx)
        return LateAnswer(MoeSum(answer(request), CallTimes(0, 0, 0, 0)), self._looks())


class LateAnswer:
    def __init__(self, total: MoeSum, num_looks: int) -> None:
        self._total, self._left = total, num_looks

    def is_done(self) -> bool:
        self._left -= 1
        return self._left < 0

    def wait(self) -> MoeSum:
        return self._total


class FakeLane:
    """A `schedule.Lane` over a StageRunner."""

    def __init__(self, runner: StageRunner[Buffer], num_rows: int) -> None:
        self._runner, self._num_rows = runner, num_rows
        self._pending: PendingStage[Buffer]

    def stage0(self, layer: int) -> None:
        self._pending = self._runner.stage0(layer, self._num_rows)

    def is_sent(self) -> bool:
        return self._pending.is_sent()

    def is_done(self) -> bool:
        return self._pending.is_done()

    def stage1(self) -> None:
        self._pending.wait()


class TwoLanes:
    """Everything of a step on one fake GPU; `memories` may be meddled with."""

    def __init__(self, seed: int, *, device: Any = None) -> None:
        self.gpu = FakeGpu(seed)
        self.caches = [
            self.gpu.allocate(f"cache{i}", HIDDEN) for i in range(NUM_LAYERS)
        ]
        self.memories = [lane_memory(self.gpu, f"lane{i}") for i in range(2)]
        self.ducks = LateDucks(partial(np.random.default_rng(seed).integers, 4))
        self.runners = [self.runner(i, device or self.gpu) for i in range(2)]

    def runner(self, lane: int, device: Any) -> StageRunner[Buffer]:
        stages = FakeStages(self.gpu, self.caches, f"lane{lane}")
        return StageRunner(device, stages, self.memories[lane], self.ducks)

    def enter(self, inputs: Sequence[np.ndarray], bias: float) -> None:
        for cache in self.caches:
            self.gpu.host_write(cache, np.zeros(HIDDEN, np.float32))
        for runner, hidden in zip(self.runners, inputs, strict=True):
            runner.enter(hidden, np.array([bias], np.float32))

    def step(self, inputs: Sequence[np.ndarray], bias: float) -> list[np.ndarray]:
        self.enter(inputs, bias)
        pairs = zip(self.runners, inputs, strict=True)
        run_lanes([FakeLane(runner, len(x)) for runner, x in pairs], NUM_LAYERS)
        pairs = zip(self.runners, inputs, strict=True)
        return [runner.leave(len(x)).copy() for runner, x in pairs]


def lane_memory(gpu: FakeGpu, name: str) -> LaneMemory[Buffer]:
    rows = (MAX_ROWS, HIDDEN)
    return LaneMemory(
        hidden=gpu.allocate(f"{name}.hidden", rows),
        metadata=gpu.allocate(f"{name}.metadata", 1),
        request=gpu.allocate(f"{name}.request", rows, np.uint16),
        topk_ids=gpu.allocate(f"{name}.topk_ids", (MAX_ROWS, 1), np.int32),
        topk_weights=gpu.allocate(f"{name}.topk_weights", (MAX_ROWS, 1)),
        total=gpu.allocate(f"{name}.total", rows),
        flag=gpu.allocate_flag(f"{name}.flag"),
        max_rows=MAX_ROWS,
    )


def serial_step(inputs: Sequence[np.ndarray], bias: float) -> list[np.ndarray]:
    caches, outputs = np.zeros((NUM_LAYERS, HIDDEN), np.float32), []
    for rows in inputs:
        hidden = rows.copy()
        for layer in range(NUM_LAYERS):
            attend(hidden, caches[layer], layer, np.float32(bias))
            ids = np.ones((len(rows), 1), np.int32)
            weights = np.full((len(rows), 1), 0.25, np.float32)
            hidden += answer(MoeRequest(layer, to_wire(hidden), ids, weights))
        outputs.append(hidden)
    return outputs
