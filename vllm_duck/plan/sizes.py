"""How many bytes a model's parts take, from its config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_duck.errors import DuckConfigError
from vllm_duck.models.dimensions import Dimensions

# A float32 scale for each 128 x 128 codes.
FP8_BYTES = 1 + 4 / (128 * 128)
BF16_BYTES = 2.0
# Four bits and a bf16 scale for each 32; eight bits and one.
INT4_BYTES = 0.5 + 2 / 32
INT8_BYTES = 1 + 2 / 32
# Of a token in one layer: the latent with its RoPE part, and the indexer's key.
FP8_LATENT_BYTES, FP8_INDEX_BYTES = 656, 132


@dataclass(frozen=True)
class Sizes:
    """Parameters of each part, and how large a parameter is in the checkpoint."""

    dims: Dimensions
    # Of linears, MLA projections and experts: FP8_BYTES or BF16_BYTES.
    weight_bytes: float

    @property
    def attention(self) -> int:
        """Of a layer, but for its indexer."""
        d = self.dims
        query = d.qk_nope_head_dim + d.qk_rope_head_dim
        down = d.q_lora_rank + d.kv_lora_rank + d.qk_rope_head_dim
        up = d.num_attention_heads * query
        kv_up = d.num_attention_heads * (d.qk_nope_head_dim + d.v_head_dim)
        return (
            d.hidden_size * down
            + d.q_lora_rank * up
            + d.kv_lora_rank * kv_up
            + d.num_attention_heads * d.v_head_dim * d.hidden_size
        )

    @property
    def indexer(self) -> int:
        """Of a layer that has one, but for its head weights."""
        d = self.dims
        up = d.index_n_heads * d.index_head_dim
        return d.hidden_size * d.index_head_dim + d.q_lora_rank * up

    @property
    def index_weights(self) -> int:
        """The indexer's head weights; bf16 in every checkpoint."""
        return self.dims.hidden_size * self.dims.index_n_heads

    @property
    def expert(self) -> int:
        return 3 * self.dims.hidden_size * self.dims.moe_intermediate_size

    @property
    def shared(self) -> int:
        return self.dims.n_shared_experts * self.expert

    @property
    def router(self) -> int:
        """Of a MoE layer; held in float32."""
        return self.dims.n_routed_experts * self.dims.hidden_size

    @property
    def dense(self) -> int:
        """The MLP of a layer without experts."""
        return 3 * self.dims.hidden_size * self.dims.intermediate_size

    @property
    def vocabulary(self) -> int:
        """Of the embedding, and of the head."""
        return self.dims.vocab_size * self.dims.hidden_size

    @property
    def mtp_projection(self) -> int:
        return 2 * self.dims.hidden_size**2

    @property
    def num_layers(self) -> int:
        """With the MTP layer."""
        return self.dims.num_hidden_layers + self.num_mtp

    @property
    def num_mtp(self) -> int:
        return min(1, self.dims.num_nextn_predict_layers)

    @property
    def num_indexers(self) -> int:
        """Layers with an indexer, the MTP layer included."""
        return sum(layer < self.num_layers for layer in self.dims.index_layer_ids)

    @property
    def index_share(self) -> float:
        """Of the layers, those with an indexer."""
        return self.num_indexers / self.num_layers

    @property
    def num_moe(self) -> int:
        """Layers with routed experts that a step runs, without the MTP layer."""
        last = self.dims.num_hidden_layers
        return sum(layer < last for layer in self.dims.moe_layer_ids)

    @property
    def num_dense(self) -> int:
        return self.dims.num_hidden_layers - self.num_moe

    def attention_bytes(self, weight_bytes: float) -> float:
        """Of a layer, with its share of the indexers."""
        indexer = self.indexer * weight_bytes + self.index_weights * BF16_BYTES
        return self.attention * weight_bytes + self.index_share * indexer

    def moe_host_bytes(self, weight_bytes: float) -> float:
        """What the host reads of a MoE layer."""
        own = self.attention_bytes(weight_bytes) + self.shared * weight_bytes
        return own + self.router * 4

    def dense_bytes(self, weight_bytes: float) -> float:
        return self.attention_bytes(weight_bytes) + self.dense * weight_bytes

    def host_bytes(self, weight_bytes: float) -> float:
        """All that the host holds but embedding and head."""
        d = self.dims
        norms = 4 * d.hidden_size + 2 * d.q_lora_rank + 2 * d.kv_lora_rank
        return (
            (self.num_moe + self.num_mtp) * self.moe_host_bytes(weight_bytes)
            + self.num_dense * self.dense_bytes(weight_bytes)
            + self.num_mtp * self.mtp_projection * weight_bytes
            + self.num_layers * norms * BF16_BYTES
        )

    @property
    def vocabulary_bytes(self) -> float:
        """Of the embedding, and of the head: bf16 in every checkpoint."""
        return self.vocabulary * BF16_BYTES

    def experts_bytes(self, weight_bytes: float) -> float:
        """Of all routed experts, the MTP layer's too."""
        num_layers = self.num_moe + self.num_mtp
        return num_layers * self.dims.n_routed_experts * self.expert * weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Of one token in all fp8 caches."""
        index_bytes = self.num_indexers * FP8_INDEX_BYTES
        return self.num_layers * FP8_LATENT_BYTES + index_bytes


def read_sizes(path: Path) -> Sizes:
    """Of a config.json, or of the one in a directory; nothing else is read.

    Raises:
        DuckConfigError: there is none, or it is no model that duck serves.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DuckConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise DuckConfigError(f"{path} is no config.json of a model")
    dims = Dimensions.from_hf_config(SimpleNamespace(**config))
    return Sizes(dims, FP8_BYTES if _is_fp8(config) else BF16_BYTES)


def _is_fp8(config: dict[str, Any]) -> bool:
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"
