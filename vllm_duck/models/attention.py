"""The attention block of a DeepSeek-V3.2 layer: MLA with the lightning indexer."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import IndexCache, LatentCache
from vllm_duck.models.kv_format import IndexFormat, KvDtype, LatentFormat
from vllm_duck.models.linear import FusedLinear, Norm
from vllm_duck.models.rope import half_split_to_interleaved, rotate, softmax_scale
from vllm_duck.models.sparse_attention import AttentionInputs, attend

INDEX_NORM_EPS = 1e-6


class SparseAttention(nn.Module):
    """hidden [T, H] -> attention output [T, H]; reads and writes its two caches."""

    def __init__(self, dims: Dimensions, kv_dtype: KvDtype, prefix: str) -> None:
        super().__init__()
        self.dims = dims
        heads, rope_dim = dims.num_attention_heads, dims.qk_rope_head_dim
        self.qk_head_dim = dims.qk_nope_head_dim + rope_dim
        self.scale = softmax_scale(dims.rope, self.qk_head_dim)
        self.index_scale = dims.index_n_heads**-0.5 * dims.index_head_dim**-0.5
        self.down = FusedLinear(
            dims.hidden_size,
            {
                "q_a_proj": dims.q_lora_rank,
                "kv_a_proj_with_mqa": dims.kv_lora_rank + rope_dim,
                "indexer.wk": dims.index_head_dim,
                "indexer.weights_proj": dims.index_n_heads,
            },
        )
        self.up = FusedLinear(
            dims.q_lora_rank,
            {
                "q_b_proj": heads * self.qk_head_dim,
                "indexer.wq_b": dims.index_n_heads * dims.index_head_dim,
            },
        )
        self.kv_b = FusedLinear(
            dims.kv_lora_rank,
            {"kv_b_proj": heads * (dims.qk_nope_head_dim + dims.v_head_dim)},
        )
        self.out = FusedLinear(heads * dims.v_head_dim, {"o_proj": dims.hidden_size})
        self.q_norm = Norm(dims.q_lora_rank, dims.rms_norm_eps)
        self.kv_norm = Norm(dims.kv_lora_rank, dims.rms_norm_eps)
        # fp32, as the official code keeps it.
        self.index_norm = nn.LayerNorm(
            dims.index_head_dim, eps=INDEX_NORM_EPS, dtype=torch.float32
        )
        self.latent_cache = LatentCache(
            f"{prefix}.latent", LatentFormat(dims.kv_lora_rank, rope_dim, kv_dtype)
        )
        self.index_cache = IndexCache(
            f"{prefix}.index", IndexFormat(dims.index_head_dim, kv_dtype)
        )
        # Set by finish_loading: the two halves of kv_b_proj, per head.
        self.key_up: Tensor
        self.value_up: Tensor

    def forward(self, hidden: Tensor, rotations: Tensor) -> Tensor:
        """hidden [T, H] bf16, rotations [T, 1, R / 2] complex64 -> [T, H] bf16."""
        dims = self.dims
        q_low, kv_low, index_key, index_weight = self.down(hidden)
        latent, key_rope = kv_low.split([dims.kv_lora_rank, dims.qk_rope_head_dim], -1)
        latent = self.kv_norm(latent)
        query, index_query = self.up(self.q_norm(q_low))
        query = query.unflatten(-1, (-1, self.qk_head_dim))
        index_query = index_query.unflatten(-1, (-1, dims.index_head_dim))
        index_key = F.layer_norm(
            index_key.float(),
            (dims.index_head_dim,),
            self.index_norm.weight,
            self.index_norm.bias,
            INDEX_NORM_EPS,
        )
        query_rope, key_rope, index_query, index_key = self._rotate(
            query, key_rope, index_query, index_key, rotations
        )
        batch = self._batch()
        if batch is None:
            # A profiling run: no caches yet, and the values do not matter.
            return hidden
        self.latent_cache.write(batch, self.latent_cache.format.pack(latent, key_rope))
        self.index_cache.write(batch, self.index_cache.format.pack(index_key))
        nope = query[..., : dims.qk_nope_head_dim].transpose(0, 1)
        query_latent = torch.bmm(nope, self.key_up).transpose(0, 1)
        inputs = AttentionInputs(
            query=torch.cat([query_latent, query_rope.to(query.dtype)], -1),
            index_query=index_query,
            index_weight=index_weight.float() * self.index_scale,
        )
        output_latent = attend(
            inputs,
            batch,
            latent_cache=self.latent_cache,
            index_cache=self.index_cache,
            index_topk=dims.index_topk,
            scale=self.scale,
        )
        values = torch.bmm(output_latent.transpose(0, 1), self.value_up)
        (out,) = self.out(values.transpose(0, 1).flatten(1))
        return out

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for module in (self.down, self.up, self.kv_b, self.out):
            yield from module.checkpoint_views(prefix)
        yield from self.q_norm.checkpoint_views(f"{prefix}.q_a_layernorm")
        yield from self.kv_norm.checkpoint_views(f"{prefix}.kv_a_layernorm")
        yield f"{prefix}.indexer.k_norm.weight", self.index_norm.weight.data
        yield f"{prefix}.indexer.k_norm.bias", self.index_norm.bias.data

    def finish_loading(self) -> None:
        """Fold kv_b_proj per head and bring the indexer's RoPE to one layout."""
        dims = self.dims
        per_head = self.kv_b.weight.data.view(
            dims.num_attention_heads, -1, dims.kv_lora_rank
        )
        key_up, value_up = per_head.split(
            [dims.qk_nope_head_dim, dims.v_head_dim], dim=1
        )
        self.key_up = key_up.contiguous()
        self.value_up = value_up.transpose(1, 2).contiguous()
        del self.kv_b
        order = torch.arange(dims.index_head_dim)
        order[: dims.qk_rope_head_dim] = half_split_to_interleaved(
            dims.qk_rope_head_dim
        )
        for name, view in self.up.checkpoint_views(""):
            if name == ".indexer.wq_b.weight":
                heads = view.view(dims.index_n_heads, dims.index_head_dim, -1)
                heads.copy_(heads[:, order].clone())
        for name, view in self.down.checkpoint_views(""):
            if name == ".indexer.wk.weight":
                view.copy_(view[order].clone())
        for parameter in (self.index_norm.weight, self.index_norm.bias):
            parameter.data = parameter.data[order].clone()

    def _rotate(
        self,
        query: Tensor,
        key_rope: Tensor,
        index_query: Tensor,
        index_key: Tensor,
        rotations: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotate all four rope parts as one stack of heads; returns fp32."""
        rope_dim = self.dims.qk_rope_head_dim
        parts = [
            query[..., self.dims.qk_nope_head_dim :],
            key_rope.unsqueeze(1),
            index_query[..., :rope_dim],
            index_key[:, None, :rope_dim],
        ]
        rotated = rotate(torch.cat([part.float() for part in parts], 1), rotations)
        query_rope, key_rope, index_query_rope, index_key_rope = rotated.split(
            [part.shape[1] for part in parts], 1
        )
        return (
            query_rope,
            key_rope.squeeze(1),
            torch.cat([index_query_rope, index_query[..., rope_dim:].float()], -1),
            torch.cat([index_key_rope.squeeze(1), index_key[:, rope_dim:]], -1),
        )

    def _batch(self) -> AttentionBatch | None:
        metadata = get_forward_context().attn_metadata
        return None if metadata is None else metadata[self.latent_cache.prefix]
