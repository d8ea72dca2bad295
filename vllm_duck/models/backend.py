"""The seam between the model and what computes its layers: one backend per device.

The model's wiring, the lanes and the runner use a backend through this seam alone.
Rows are opaque to them: handed from layer to layer, cut by `take` and joined by
`concat`. What describes a step (AttentionBatch, RowIndex) is plain data in this
machine's memory. docs/backends.md says what a second backend brings, file by file.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vllm_duck.executor.duck import CallTimes, Ducks
from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches
from vllm_duck.models.matrix import Matrix

# Hidden rows [T, H] in whatever form the backend's layers hand them on.
Rows: TypeAlias = Any
# Which rows: indices [W], or consecutive ones.
RowIndex: TypeAlias = npt.NDArray[np.int64] | slice


class Step(Protocol):
    """The tokens of a step, or of one lane of it, as all layers take them."""

    @property
    def batch(self) -> AttentionBatch: ...

    @property
    def num_rows(self) -> int:
        """Those of the batch, and then padding."""
        ...

    def lane(self, index: RowIndex, batch: AttentionBatch) -> "Step":
        """Some of its rows, in this order, as a step; batch: the same tokens.

        What layers keep for those behind them is cut with the rows.
        """
        ...

    def behind(
        self, index: RowIndex, batch: AttentionBatch, rotations: Tensor
    ) -> "Step":
        """A step of further rows, each behind one of this one's.

        index: that row of each. It attends to what that row chose, if the layer keeps
        it (`Dimensions.is_choice_kept`); else it chooses for itself.
        """
        ...


class LayerOutput(NamedTuple):
    """A layer's output, and how long its ducks took."""

    rows: Rows
    # None: a layer without ducks.
    call: CallTimes | None


class PendingLayer(Protocol):
    """A layer from the start of its stage 0 to the end of its stage 1."""

    def is_sent(self) -> bool:
        """Whether the rows are with the ducks; sends them if they have become ready."""
        ...

    def is_done(self) -> bool:
        """Whether wait() would return or raise at once."""
        ...

    def wait(self) -> LayerOutput:
        """Wait for stage 1."""
        ...


class Part(Protocol):
    """A part of the model that has weights: an nn.Module."""

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor | Matrix]]:
        """The checkpoint's tensors that it holds, each with where to put it.

        A `Matrix` takes what the file has, mapped; a view in e4m3 a copy of the codes,
        with a view of its own for `NAME_scale_inv`; any other view the product of both.
        """
        ...

    def finish_loading(self) -> None:
        """Called once, when all views are filled, and before anything is computed.

        The weights may be brought into another form here, and what no kernel reads any
        more be freed.
        """
        ...


class Layer(Part, Protocol):
    """A decoder layer."""

    def stage0(
        self, rows: Rows, step: Step, wanted: RowIndex | None = None
    ) -> PendingLayer:
        """Begin attention, router and shared expert, and send to the ducks.

        wait() of the result is stage 1. wanted: the rows to compute the layer for, or
        none; by default all. The keys of all rows are cached in any case.
        """
        ...

    def attach_ducks(self, ducks: Ducks) -> None:
        """Hand over who computes the routed experts; before the first stage 0."""
        ...


class RowFunction(Part, Protocol):
    """A norm or a linear: [T, in] bf16 -> [T, out] bf16."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Embedding(Part, Protocol):
    """ids [T] -> [T, H] bf16."""

    # Two of the same weights are one embedding: a draft's and the target's.
    weight: Tensor

    def __call__(self, input_ids: Tensor) -> Tensor: ...


class Head(Part, Protocol):
    """The LM head."""

    # As of an embedding; there beside whatever finish_loading() makes of it.
    weight: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] bf16 -> [T, V] fp32, as accumulated."""
        ...


class HostBackend(Protocol):
    """Makes the parts of the host's model for one device, and passes its rows."""

    def layer(self, dims: Dimensions, layer_idx: int, caches: LayerCaches) -> Layer:
        """caches: vLLM puts their memory behind them later (`PagedCache.kv_cache`).

        Raises:
            DuckConfigError: one of the family's rules is not computed here.
        """
        ...

    def norm(self, size: int, eps: float) -> RowFunction:
        """RMS norm, with weights."""
        ...

    def linear(self, in_features: int, out_features: int) -> RowFunction:
        """Without a bias."""
        ...

    def embedding(self, vocab_size: int, hidden_size: int) -> Embedding: ...

    def head(self, vocab_size: int, hidden_size: int) -> Head: ...

    def step(self, batch: AttentionBatch, rotations: Tensor) -> Step:
        """rotations: as Rope gives them, one for each row, padding included."""
        ...

    def enter(self, hidden: Tensor) -> Rows:
        """hidden [T, H] bf16 as rows for the layers."""
        ...

    def leave(self, rows: Rows) -> Tensor:
        """The inverse of `enter`."""
        ...

    def take(self, rows: Rows, index: RowIndex) -> Rows: ...

    def concat(self, parts: Sequence[Rows]) -> Rows: ...


class LayerRunner(Protocol):
    """Takes rows through layers, in whatever order its lanes ask for."""

    def __call__(self, layers: Sequence[Layer], rows: Rows, step: Step) -> Rows:
        """The last layer's output, of the same rows."""
        ...


def run_layers(layers: Sequence[Layer], rows: Rows, step: Step) -> Rows:
    """The serial schedule: each layer's ducks are awaited before the next layer."""
    for layer in layers:
        rows = layer.stage0(rows, step).wait().rows
    return rows
