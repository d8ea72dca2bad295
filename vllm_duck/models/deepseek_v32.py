"""DeepSeek-V3.2 as vLLM sees it, with its routed experts at the ducks."""

from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_duck.config import DuckConfig, HandOver
from vllm_duck.models.batch import current_batch
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.host import finish_loading, from_bits, to_bits
from vllm_duck.models.kv_format import KvDtype
from vllm_duck.models.lanes import LanePolicy, run_in_lanes
from vllm_duck.models.layer import DecoderLayer, run_layers
from vllm_duck.models.linear import Norm
from vllm_duck.models.lm_head import LmHead
from vllm_duck.models.moe import Ducks, RemoteMoe
from vllm_duck.models.overlap import OverlapMeter
from vllm_duck.models.rope import Rope


class Trunk(nn.Module):
    def __init__(
        self, dims: Dimensions, kv_dtype: KvDtype, prefix: str, *, overlaps: bool
    ) -> None:
        super().__init__()
        self.num_dense_layers = dims.first_k_dense_replace
        self.lane_policy = LanePolicy(overlaps)
        self.meter = OverlapMeter()
        self.embed_tokens = VocabParallelEmbedding(dims.vocab_size, dims.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(dims, layer_idx, kv_dtype, f"{prefix}.layers.{layer_idx}")
            for layer_idx in range(dims.num_hidden_layers)
        )
        self.norm = Norm(dims.hidden_size, dims.rms_norm_eps)
        self.rope = Rope(dims.rope, dims.qk_rope_head_dim)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [T, H] embeddings, positions [T] int64 -> [T, H], normed."""
        layers = cast(list[DecoderLayer], list(self.layers))
        rotations = self.rope.rotations(positions).numpy()
        batch = current_batch(layers[0].attention.latent_cache.prefix)
        bits = to_bits("hidden", hidden, self.norm.weight.shape[0])
        # Dense layers have nothing to wait for: all rows at once read the weights once.
        dense_layers = layers[: self.num_dense_layers]
        bits = run_layers(dense_layers, bits, rotations, batch)
        bits = run_in_lanes(
            layers[self.num_dense_layers :],
            bits,
            rotations,
            batch,
            policy=self.lane_policy,
            meter=self.meter,
        )
        return self.norm(from_bits(bits))


class DeepseekV32ForCausalLM(nn.Module):
    """vLLM's model contract: embed, forward, compute logits.

    Weights come through `checkpoint_views`: every tensor that the host owns, by its
    checkpoint name, as a view to fill. Routed experts are not among them.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.dims = Dimensions.from_hf_config(vllm_config.model_config.hf_config)
        self.model = Trunk(
            self.dims,
            HandOver.of(vllm_config).kv_dtype,
            "model",
            overlaps=DuckConfig.of(vllm_config).overlap,
        )
        self.lm_head = LmHead(self.dims.vocab_size, self.dims.hidden_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """input_ids [T], positions [T] -> final hidden states [T, H], normed."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(inputs_embeds, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.lm_head.logits(hidden_states)

    def attach_ducks(self, ducks: Ducks) -> None:
        for module in self.modules():
            if isinstance(module, RemoteMoe):
                module.ducks = ducks

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        vocab_size = self.dims.vocab_size
        yield (
            "model.embed_tokens.weight",
            self.model.embed_tokens.weight.data[:vocab_size],
        )
        for layer_idx, layer in enumerate(cast(list[DecoderLayer], self.model.layers)):
            yield from layer.checkpoint_views(f"model.layers.{layer_idx}")
        yield from self.model.norm.checkpoint_views("model.norm")
        yield "lm_head.weight", self.lm_head.weight.data[:vocab_size]

    def finish_loading(self) -> None:
        finish_loading(self)
