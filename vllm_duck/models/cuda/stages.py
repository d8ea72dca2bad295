"""Runs the stages of one lane: graphs, the flag behind them, and what is sent then.

Stage 0 of a layer is one launch, and nothing waits in it. Its last kernel writes the
request into pinned memory and raises the lane's flag; whoever asks `is_sent` sees the
flag and sends. The ducks' sum goes into pinned memory, where the next graph adds it.
Invariants, pinned by tests:
- a lane has one stage in flight, and memory that no other lane has;
- a graph exists once for each layer and number of rows, and is captured before the
  launch, while the lane has nothing in flight.
"""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_duck.errors import DuckShapeError
from vllm_duck.executor.duck import CallTimes, Ducks, InFlight, MoeRequest, MoeSum
from vllm_duck.models.cuda.device import Device, Graph

B = TypeVar("B")

# In the place of a layer: the graph that ends a step.
_LEAVE = -1


@dataclass(frozen=True)
class LaneMemory(Generic[B]):
    """One lane's memory, allocated once and before any capture; all of it pinned.

    Shapes: T rows at most, H hidden size, A experts per token.
        hidden        [T, H]  the rows as they enter the layers, and as they leave
        metadata      any     what the kernels know of the step; the caller's
        request       [T, H]  uint16, bf16 bits
        topk_ids      [T, A]  int32
        topk_weights  [T, A]  float32
        total         [T, H]  float32, the ducks' sum
        flag          [1]     int64, 0 at first; each flag adds one
    """

    hidden: B
    metadata: B
    request: B
    topk_ids: B
    topk_weights: B
    total: B
    flag: B
    max_rows: int


class Stages(Protocol):
    """Starts the kernels of a lane; called in captures alone."""

    def moe(self, layer_idx: int, memory: LaneMemory[Any], num_rows: int) -> None:
        """Add the sum of the layer before, attend, write the request, raise the flag.

        What does not go to the ducks, as the shared expert, may come behind the flag.
        """
        ...

    def leave(self, memory: LaneMemory[Any], num_rows: int) -> None:
        """Add the last layer's sum, write `hidden`, raise the flag."""
        ...


class StageRunner(Generic[B]):
    """Owns a lane's graphs, and how many flags it has seen."""

    def __init__(
        self, device: Device[B], stages: Stages, memory: LaneMemory[B], ducks: Ducks
    ) -> None:
        self._device = device
        self._stages = stages
        self._memory = memory
        self._ducks = ducks
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._num_flags = 0
        self._in_flight = False

    def enter(
        self, hidden: npt.NDArray[np.generic], metadata: npt.NDArray[np.generic]
    ) -> None:
        """Put a step's rows and metadata where the graphs read them.

        Raises:
            DuckShapeError: more rows than the lane has memory for.
        """
        assert not self._in_flight, "the lane has a stage in flight"
        self._check_rows(len(hidden))
        self._device.host_write(self._memory.hidden, hidden)
        self._device.host_write(self._memory.metadata, metadata)

    def stage0(self, layer_idx: int, num_rows: int) -> "PendingStage[B]":
        """Launch a layer's stage 0; its stage 1 is `wait` of the result."""
        self._launch(layer_idx, num_rows)
        return PendingStage(self, layer_idx, num_rows)

    def leave(self, num_rows: int) -> npt.NDArray[Any]:
        """The rows behind the last layer: a view, valid until the next `enter`."""
        self._launch(_LEAVE, num_rows)
        while not self.flag_is_up():
            pass
        self._in_flight = False
        return self._device.host_read(self._memory.hidden)[:num_rows]

    def flag_is_up(self) -> bool:
        return self._device.is_raised(self._memory.flag, self._num_flags)

    def send(self, layer_idx: int, num_rows: int) -> InFlight[MoeSum]:
        """Send the request behind the flag: pinned memory, as it is."""
        memory, read = self._memory, self._device.host_read
        return self._ducks.send(
            MoeRequest(
                layer_idx=layer_idx,
                hidden=read(memory.request)[:num_rows],
                topk_ids=read(memory.topk_ids)[:num_rows],
                topk_weights=read(memory.topk_weights)[:num_rows],
            )
        )

    def take(self, total: npt.NDArray[np.float32]) -> None:
        """End the stage: its sum is there for the next graph."""
        self._device.host_write(self._memory.total, total)
        self._in_flight = False

    def _launch(self, layer_idx: int, num_rows: int) -> None:
        assert not self._in_flight, "the lane has a stage in flight"
        graph = self._graph(layer_idx, num_rows)
        self._device.launch(graph)
        self._num_flags += 1
        self._in_flight = True

    def _graph(self, layer_idx: int, num_rows: int) -> Graph:
        key = layer_idx, num_rows
        if key not in self._graphs:
            self._check_rows(num_rows)
            self._graphs[key] = self._device.capture(lambda: self._start(*key))
        return self._graphs[key]

    def _start(self, layer_idx: int, num_rows: int) -> None:
        if layer_idx == _LEAVE:
            self._stages.leave(self._memory, num_rows)
        else:
            self._stages.moe(layer_idx, self._memory, num_rows)

    def _check_rows(self, num_rows: int) -> None:
        most = self._memory.max_rows
        if not 1 <= num_rows <= most:
            raise DuckShapeError(
                f"a lane has memory for 1 to {most} rows, got {num_rows}; "
                "allocate LaneMemory with more max_rows"
            )


class PendingStage(Generic[B]):
    """One layer of one lane, from its launch to the ducks' sum."""

    def __init__(self, runner: StageRunner[B], layer_idx: int, num_rows: int) -> None:
        self._runner = runner
        self._layer_idx = layer_idx
        self._num_rows = num_rows
        self._call: InFlight[MoeSum] | None = None

    def is_sent(self) -> bool:
        """Whether the rows are with the ducks; sends them if the flag is up."""
        if self._call is None and self._runner.flag_is_up():
            self._call = self._runner.send(self._layer_idx, self._num_rows)
        return self._call is not None

    def is_done(self) -> bool:
        """Whether wait() would return or raise at once."""
        return self.is_sent() and self._sent().is_done()

    def wait(self) -> CallTimes:
        """Wait for the sum, and leave it to the lane's next graph.

        Raises:
            DuckTransportError: as of `InFlight.wait`. The lane is of no use then.
        """
        while not self.is_sent():
            pass
        total, times = self._sent().wait()
        self._runner.take(total)
        return times

    def _sent(self) -> InFlight[MoeSum]:
        assert self._call is not None
        return self._call
