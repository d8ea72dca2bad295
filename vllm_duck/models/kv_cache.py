"""The paged caches of a layer as vLLM knows them: specs, backends, binding.

A layer without an indexer has one, the others two. vLLM allocates them, counts them in
its budget and keeps one block table and one slot mapping for all of them, since every
spec has the same block size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from vllm_duck.models.batch import NO_TOKENS, AttentionBatch, plan_batch
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_format import IndexFormat, KvDtype, LatentFormat


class PagedCache(nn.Module, AttentionLayerBase):
    """One cache of one layer: rows of token_bytes bytes, one a slot, once bound.

    Slot p of block b is row b * block_size + p.
    """

    role: SparseCacheRole
    backend: type[AttentionBackend]

    def __init__(self, prefix: str, token_format: LatentFormat | IndexFormat) -> None:
        super().__init__()
        self.prefix = prefix
        self.format = token_format
        self.kv_cache = torch.empty(0)
        layers = get_current_vllm_config().compilation_config.static_forward_context
        assert prefix not in layers, prefix
        layers[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.format.token_bytes,
            dtype=torch.uint8,
            cache_role=self.role,
            cache_dtype_str="fp8_ds_mla" if self.format.dtype == "fp8" else None,
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """kv_cache [num_blocks, 1, block_size, token_bytes] uint8, from vLLM."""
        assert kv_cache.is_contiguous()
        assert kv_cache.shape[-1] == self.format.token_bytes
        self.kv_cache = kv_cache


class BatchBuilder(AttentionMetadataBuilder[AttentionBatch]):
    """Turns vLLM's description of a step into an AttentionBatch, once a step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionBatch:
        return plan_batch(
            query_start_loc=common_attn_metadata.query_start_loc_cpu,
            seq_lens=common_attn_metadata.seq_lens,
            block_table=common_attn_metadata.block_table_tensor,
            slot_mapping=common_attn_metadata.slot_mapping,
            num_reqs=common_attn_metadata.num_reqs,
            num_tokens=common_attn_metadata.num_actual_tokens,
            block_size=self.kv_cache_spec.block_size,
        )


class NoBuilder(AttentionMetadataBuilder[Any]):
    """The indexer's cache shares the block table of the latent cache: no metadata."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> None:
        return None


class _Backend(AttentionBackend):
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("duck layers compute their attention themselves")

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class LatentBackend(_Backend):
    @staticmethod
    def get_name() -> str:
        return "DUCK_LATENT"

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        return BatchBuilder


# A backend of its own, as vLLM's draft proposer groups layers by backend class.
class IndexBackend(_Backend):
    @staticmethod
    def get_name() -> str:
        return "DUCK_INDEX"

    @staticmethod
    def get_builder_cls() -> type[NoBuilder]:
        return NoBuilder


class LatentCache(PagedCache):
    format: LatentFormat
    role = SparseCacheRole.SPARSE
    backend = LatentBackend


class IndexCache(PagedCache):
    format: IndexFormat
    role = SparseCacheRole.INDEXER
    backend = IndexBackend


@dataclass(frozen=True)
class LayerCaches:
    """The caches of one layer."""

    latent: LatentCache
    # None: the layer has no indexer.
    index: IndexCache | None

    @classmethod
    def of(
        cls,
        dims: Dimensions,
        kv_dtype: KvDtype,
        prefix: str,
        *,
        has_indexer: bool = True,
    ) -> "LayerCaches":
        """Caches that vLLM will allocate; prefix: the name of the layer's attention."""
        latent = LatentFormat(dims.kv_lora_rank, dims.qk_rope_head_dim, kv_dtype)
        index = IndexFormat(dims.index_head_dim, kv_dtype)
        return cls(
            LatentCache(f"{prefix}.latent", latent),
            IndexCache(f"{prefix}.index", index) if has_indexer else None,
        )

    def current_batch(self) -> AttentionBatch:
        """The batch that vLLM's runner gave the layer for this step."""
        metadata = get_forward_context().attn_metadata
        return NO_TOKENS if metadata is None else metadata[self.latent.prefix]
