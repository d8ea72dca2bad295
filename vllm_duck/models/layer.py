"""One decoder layer, in two stages: what the host does, and the wait for the ducks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from vllm_duck.executor.duck import CallTimes
from vllm_duck.models.attention import SparseAttention
from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.host import Bits
from vllm_duck.models.kv_format import KvDtype
from vllm_duck.models.linear import Mlp
from vllm_duck.models.moe import RemoteMoe
from vllm_duck.models.rope import Rotations


class PendingLayer(Protocol):
    """A layer whose stage 0 is done."""

    def is_done(self) -> bool:
        """Whether result() would return or raise at once."""
        ...

    def result(self) -> Bits:
        """Wait for stage 1; the layer's output [T, H] bf16 bits."""
        ...

    def times(self) -> CallTimes | None:
        """Wait for stage 1; how long it took. None: no duck was asked."""
        ...


@dataclass(frozen=True)
class DoneLayer:
    """A dense layer has no second stage."""

    hidden: Bits

    def is_done(self) -> bool:
        return True

    def result(self) -> Bits:
        return self.hidden

    def times(self) -> None:
        return None


class DecoderLayer(nn.Module):
    def __init__(
        self, dims: Dimensions, layer_idx: int, kv_dtype: KvDtype, prefix: str
    ) -> None:
        super().__init__()
        self.attention = SparseAttention(dims, kv_dtype, f"{prefix}.self_attn")
        self.mlp: RemoteMoe | Mlp
        if dims.is_moe_layer(layer_idx):
            self.mlp = RemoteMoe(dims, layer_idx)
        else:
            self.mlp = Mlp(dims.hidden_size, dims.intermediate_size)

    def start(
        self,
        hidden: Bits,
        rotations: Rotations,
        batch: AttentionBatch,
        wanted: npt.NDArray[np.int64] | None = None,
    ) -> PendingLayer:
        """Stage 0: hidden [T, H] bits through attention, router and shared expert.

        Stage 1 is `.result()`: it waits for the ducks and returns the layer's output.
        wanted: the rows [W] to compute it for; by default all. The keys of all rows
        are cached in any case.
        """
        residual, normed = self.attention(hidden, rotations, batch)
        if wanted is not None:
            residual, normed = residual[wanted], normed[wanted]
        if isinstance(self.mlp, RemoteMoe):
            return self.mlp.start(normed, residual)
        return DoneLayer(self.mlp.add_to(residual, normed))

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        attention = self.attention
        yield from attention.input_norm.checkpoint_views(f"{prefix}.input_layernorm")
        yield from attention.output_norm.checkpoint_views(
            f"{prefix}.post_attention_layernorm"
        )
        yield from attention.checkpoint_views(f"{prefix}.self_attn")
        yield from self.mlp.checkpoint_views(f"{prefix}.mlp")


def run_layers(
    layers: Iterable[DecoderLayer],
    hidden: Bits,
    rotations: Rotations,
    batch: AttentionBatch,
) -> Bits:
    """The serial schedule: each layer's ducks are awaited before the next layer."""
    for layer in layers:
        hidden = layer.start(hidden, rotations, batch).result()
    return hidden
