"""One decoder layer, in two stages: what the host does, and the wait for the ducks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from vllm_duck.models.attention import SparseAttention
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_format import KvDtype
from vllm_duck.models.linear import Mlp, Norm
from vllm_duck.models.moe import PendingMoe, RemoteMoe


@dataclass(frozen=True)
class PendingLayer:
    """A layer between its two stages."""

    residual: Tensor
    moe: PendingMoe

    def result(self) -> Tensor:
        """Stage 1: wait for the ducks; returns the layer's output [T, H]."""
        return self.residual + self.moe.result()


@dataclass(frozen=True)
class DoneLayer:
    """A dense layer has no second stage."""

    hidden: Tensor

    def result(self) -> Tensor:
        return self.hidden


class DecoderLayer(nn.Module):
    def __init__(
        self, dims: Dimensions, layer_idx: int, kv_dtype: KvDtype, prefix: str
    ) -> None:
        super().__init__()
        self.input_norm = Norm(dims.hidden_size, dims.rms_norm_eps)
        self.mlp_norm = Norm(dims.hidden_size, dims.rms_norm_eps)
        self.attention = SparseAttention(dims, kv_dtype, f"{prefix}.self_attn")
        self.mlp: RemoteMoe | Mlp
        if dims.is_moe_layer(layer_idx):
            self.mlp = RemoteMoe(dims, layer_idx)
        else:
            self.mlp = Mlp(dims.hidden_size, dims.intermediate_size)

    def start(self, hidden: Tensor, rotations: Tensor) -> PendingLayer | DoneLayer:
        """Stage 0: hidden [T, H] through attention, router and shared expert."""
        residual = hidden + self.attention(self.input_norm(hidden), rotations)
        normed = self.mlp_norm(residual)
        if isinstance(self.mlp, RemoteMoe):
            return PendingLayer(residual, self.mlp.start(normed))
        return DoneLayer(residual + self.mlp(normed))

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.input_norm.checkpoint_views(f"{prefix}.input_layernorm")
        yield from self.mlp_norm.checkpoint_views(f"{prefix}.post_attention_layernorm")
        yield from self.attention.checkpoint_views(f"{prefix}.self_attn")
        yield from self.mlp.checkpoint_views(f"{prefix}.mlp")

    def finish_loading(self) -> None:
        self.attention.finish_loading()


def run_layers(
    layers: Iterable[DecoderLayer], hidden: Tensor, rotations: Tensor
) -> Tensor:
    """The serial schedule: each layer's ducks are awaited before the next layer."""
    for layer in layers:
        hidden = layer.start(hidden, rotations).result()
    return hidden
