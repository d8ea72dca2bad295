"""One decoder layer, in two stages: what the host does, and the wait for the ducks."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from vllm_duck.models.attention import SparseAttention
from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.host import Bits
from vllm_duck.models.kv_format import KvDtype
from vllm_duck.models.linear import Mlp
from vllm_duck.models.moe import RemoteMoe
from vllm_duck.models.rope import Rotations
from vllm_duck.models.stages import DoneLayer, PendingLayer


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

    def stage0(
        self,
        hidden: Bits,
        rotations: Rotations,
        batch: AttentionBatch,
        wanted: npt.NDArray[np.int64] | None = None,
    ) -> PendingLayer:
        """hidden [T, H] bits through attention, router and shared expert.

        Stage 1 is to wait() for what this returns: the ducks, and the layer's output.
        wanted: the rows [W] to compute it for; by default all. The keys of all rows
        are cached in any case.
        """
        residual, normed = self.attention(hidden, rotations, batch)
        if wanted is not None:
            residual, normed = residual[wanted], normed[wanted]
        if isinstance(self.mlp, RemoteMoe):
            return self.mlp.stage0(normed, residual)
        return DoneLayer(self.mlp.add_to(residual, normed))

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        attention = self.attention
        yield from attention.input_norm.checkpoint_views(f"{prefix}.input_layernorm")
        yield from attention.output_norm.checkpoint_views(
            f"{prefix}.post_attention_layernorm"
        )
        yield from attention.checkpoint_views(f"{prefix}.self_attn")
        yield from self.mlp.checkpoint_views(f"{prefix}.mlp")


class LayerRunner(Protocol):
    """Takes rows through layers, in whatever order its lanes ask for."""

    def __call__(
        self,
        layers: Sequence[DecoderLayer],
        hidden: Bits,
        rotations: Rotations,
        batch: AttentionBatch,
    ) -> Bits:
        """hidden [T, H] bf16 bits -> the last layer's output, the same rows."""
        ...


def run_layers(
    layers: Sequence[DecoderLayer],
    hidden: Bits,
    rotations: Rotations,
    batch: AttentionBatch,
) -> Bits:
    """The serial schedule: each layer's ducks are awaited before the next layer."""
    for layer in layers:
        hidden = layer.stage0(hidden, rotations, batch).wait().hidden
    return hidden
