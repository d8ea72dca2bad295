"""The target model as vLLM sees it, with its routed experts at the ducks."""

from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn
from vllm.config import VllmConfig

from vllm_duck.config import HandOver
from vllm_duck.executor.duck import Ducks
from vllm_duck.models.backend import (
    HostBackend,
    Layer,
    LayerRunner,
    Part,
    run_layers,
)
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches
from vllm_duck.models.kv_format import KvDtype
from vllm_duck.models.platforms import host_backend
from vllm_duck.models.rope import Rope


class TargetModel(nn.Module):
    """Everything but the head."""

    def __init__(
        self, dims: Dimensions, kv_dtype: KvDtype, prefix: str, backend: HostBackend
    ) -> None:
        super().__init__()
        self.backend = backend
        self.num_leading_dense = dims.num_leading_dense
        # Of the layers with ducks; whoever owns the lanes puts them here.
        self.run_remote_layers: LayerRunner = run_layers
        self.embed_tokens = backend.embedding(dims.vocab_size, dims.hidden_size)
        caches = [
            LayerCaches.of(
                dims,
                kv_dtype,
                f"{prefix}.layers.{i}.self_attn",
                has_indexer=i in dims.index_layer_ids,
            )
            for i in range(dims.num_hidden_layers)
        ]
        self.first_caches = caches[0]
        layers = [backend.layer(dims, i, own) for i, own in enumerate(caches)]
        self.layers = nn.ModuleList(cast(list[nn.Module], layers))
        self.norm = backend.norm(dims.hidden_size, dims.rms_norm_eps)
        self.rope = Rope(dims.rope, dims.qk_rope_head_dim)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [T, H] embeddings, positions [T] int64 -> [T, H], normed."""
        layers = cast(list[Layer], list(self.layers))
        backend = self.backend
        step = backend.step(
            self.first_caches.current_batch(), self.rope.rotations(positions)
        )
        rows = backend.enter(hidden)
        # Dense layers have nothing to wait for: all rows at once read the weights once.
        rows = run_layers(layers[: self.num_leading_dense], rows, step)
        rows = self.run_remote_layers(layers[self.num_leading_dense :], rows, step)
        return self.norm(backend.leave(rows))


class TargetForCausalLM(nn.Module):
    """vLLM's model contract: embed, forward, compute logits.

    Weights come through `parts`: every tensor that the host owns, by its checkpoint
    name. Routed experts are not among them.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.dims = Dimensions.from_hf_config(vllm_config.model_config.hf_config)
        self.backend = host_backend()
        kv_dtype = HandOver.of(vllm_config).kv_dtype
        self.model = TargetModel(self.dims, kv_dtype, "model", self.backend)
        self.lm_head = self.backend.head(self.dims.vocab_size, self.dims.hidden_size)

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
        for layer in cast(list[Layer], self.model.layers):
            layer.attach_ducks(ducks)

    def run_remote_layers_with(self, runner: LayerRunner) -> None:
        """Hand over what takes the rows through the layers that have ducks."""
        self.model.run_remote_layers = runner

    def parts(self) -> Iterator[tuple[str, Part]]:
        """What has weights, each with its name in the checkpoint."""
        names = self.dims.family.tensors
        yield names.embedding, self.model.embed_tokens
        for layer_idx, layer in enumerate(cast(list[Layer], self.model.layers)):
            yield names.layer(layer_idx), layer
        yield names.norm, self.model.norm
        yield names.head, self.lm_head
