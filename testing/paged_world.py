"""A layer's world without an engine: caches and block tables."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from vllm_duck.models.batch import AttentionBatch, plan_batch
from vllm_duck.models.cpu.attention import SparseAttention
from vllm_duck.models.cpu.step import CpuStep
from vllm_duck.models.cpu.threads import from_bits, to_bits
from vllm_duck.models.kv_cache import PagedCache

BLOCK_SIZE = 16


class PagedWorld:
    """Allocates caches for the modules built in `building()` and runs steps."""

    def __init__(self, num_blocks: int = 256) -> None:
        self.vllm_config = VllmConfig()
        self.num_blocks = num_blocks

    @contextmanager
    def building(self) -> Iterator[None]:
        with set_current_vllm_config(self.vllm_config):
            yield

    @property
    def caches(self) -> dict[str, PagedCache]:
        layers = self.vllm_config.compilation_config.static_forward_context
        return {k: v for k, v in layers.items() if isinstance(v, PagedCache)}

    def allocate(self) -> None:
        for cache in self.caches.values():
            size = (self.num_blocks, 1, BLOCK_SIZE, cache.format.token_bytes)
            # NaN in every format: what is not written must not matter.
            cache.bind_kv_cache(torch.full(size, 0xFF, dtype=torch.uint8))


def run_attention(
    attention: SparseAttention,
    hidden: torch.Tensor,
    rotations: torch.Tensor,
    batch: AttentionBatch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block on tensors: residual and normed [T, H] bf16."""
    rows = to_bits("hidden", hidden, attention.dims.hidden_size)
    residual, normed = attention(rows, CpuStep(batch, rotations.numpy()))
    return from_bits(residual), from_bits(normed)


def make_batch(
    new_tokens: list[int], seq_lens: list[int], block_table: torch.Tensor
) -> AttentionBatch:
    starts = [0]
    slots = []
    for request, (new, total) in enumerate(zip(new_tokens, seq_lens, strict=True)):
        starts.append(starts[-1] + new)
        for position in range(total - new, total):
            block = int(block_table[request, position // BLOCK_SIZE])
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
    return plan_batch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        num_reqs=len(new_tokens),
        num_tokens=starts[-1],
        block_size=BLOCK_SIZE,
    )
