"""The seam between the model and what computes its layers: one backend per device.

The model's wiring, the lanes and the runner use a backend through this seam alone. Rows
are opaque to them: handed from layer to layer, cut by `take` and joined by `concat`.
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
from vllm_duck.models.rope import Rotations

# Hidden rows [T, H] in whatever form the backend's layers hand them on.
Rows: TypeAlias = Any
# Which rows: indices [W], or consecutive ones.
RowIndex: TypeAlias = npt.NDArray[np.int64] | slice


class Step(Protocol):
    """The tokens of a step, or of one lane of it, as all layers take them."""

    @property
    def batch(self) -> AttentionBatch: ...

    @property
    def rotations(self) -> Rotations:
        """One for each row, padding included."""
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


class Layer(Protocol):
    """A decoder layer: an nn.Module."""

    def stage0(
        self, rows: Rows, step: Step, wanted: RowIndex | None = None
    ) -> PendingLayer:
        """Begin attention, router and shared expert, and send to the ducks.

        wait() of the result is stage 1. wanted: the rows to compute the layer for; by
        default all. The keys of all rows are cached in any case.
        """
        ...

    def attach_ducks(self, ducks: Ducks) -> None:
        """Hand over who computes the routed experts; before the first stage 0."""
        ...

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors that the layer holds, each with where to put it.

        A view in e4m3 takes the codes as they are, with a view of its own for
        `NAME_scale_inv`; any other view takes the product of both.
        """
        ...


class RowFunction(Protocol):
    """A norm or a linear: an nn.Module, [T, in] bf16 -> [T, out] bf16."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]: ...


class Embedding(Protocol):
    """An nn.Module: ids [T] -> [T, H] bf16."""

    weight: Tensor

    def __call__(self, input_ids: Tensor) -> Tensor: ...


class Head(Protocol):
    """The LM head: an nn.Module."""

    weight: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] bf16 -> [T, V] fp32, as accumulated."""
        ...


class HostBackend(Protocol):
    """Makes the parts of the host's model for one device."""

    def layer(self, dims: Dimensions, layer_idx: int, caches: LayerCaches) -> Layer: ...

    def norm(self, size: int, eps: float) -> RowFunction:
        """RMS norm, with weights."""
        ...

    def linear(self, in_features: int, out_features: int) -> RowFunction:
        """Without a bias."""
        ...

    def embedding(self, vocab_size: int, hidden_size: int) -> Embedding: ...

    def head(self, vocab_size: int, hidden_size: int) -> Head: ...

    def step(self, batch: AttentionBatch, rotations: Rotations) -> Step: ...

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
