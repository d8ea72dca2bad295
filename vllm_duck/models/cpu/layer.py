"""One decoder layer on the CPU: its stage 0 ends by sending the rows to the ducks."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from vllm_duck.executor.duck import Ducks
from vllm_duck.models.backend import LayerOutput, RowIndex, Step
from vllm_duck.models.cpu.attention import SparseAttention
from vllm_duck.models.cpu.linear import Mlp
from vllm_duck.models.cpu.moe import PendingMoe, RemoteMoe
from vllm_duck.models.cpu.packing import pack_modules
from vllm_duck.models.cpu.step import CpuStep
from vllm_duck.models.cpu.threads import Bits
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches
from vllm_duck.models.matrix import Matrix


@dataclass(frozen=True)
class DoneLayer:
    """A dense layer has no second stage."""

    rows: Bits

    def is_sent(self) -> bool:
        return True

    def is_done(self) -> bool:
        return True

    def wait(self) -> LayerOutput:
        return LayerOutput(self.rows, None)


class CpuLayer(nn.Module):
    """`models.backend.Layer`."""

    def __init__(self, dims: Dimensions, layer_idx: int, caches: LayerCaches) -> None:
        super().__init__()
        self.attention = SparseAttention(
            dims, caches, keeps_choices=dims.is_choice_kept(layer_idx)
        )
        self.mlp: RemoteMoe | Mlp
        if layer_idx in dims.moe_layer_ids:
            self.mlp = RemoteMoe(dims, layer_idx)
        else:
            self.mlp = Mlp(dims.hidden_size, dims.intermediate_size)

    def stage0(
        self, rows: Bits, step: Step, wanted: RowIndex | None = None
    ) -> PendingMoe | DoneLayer:
        assert isinstance(step, CpuStep)
        residual, normed = self.attention(rows, step)
        if wanted is not None:
            residual, normed = residual[wanted], normed[wanted]
            if not len(residual):
                return DoneLayer(residual)
        if isinstance(self.mlp, RemoteMoe):
            return self.mlp.stage0(normed, residual)
        return DoneLayer(self.mlp.add_to(residual, normed))

    def attach_ducks(self, ducks: Ducks) -> None:
        if isinstance(self.mlp, RemoteMoe):
            self.mlp.ducks = ducks

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor | Matrix]]:
        attention = self.attention
        yield from attention.input_norm.checkpoint_views(f"{prefix}.input_layernorm")
        yield from attention.output_norm.checkpoint_views(
            f"{prefix}.post_attention_layernorm"
        )
        yield from attention.checkpoint_views(f"{prefix}.self_attn")
        yield from self.mlp.checkpoint_views(f"{prefix}.mlp")

    def finish_loading(self) -> None:
        pack_modules(self)
