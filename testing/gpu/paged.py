"""Paged caches full of keys, and what rows see of them."""

import torch
from torch import Tensor

from testing.gpu.numbers import seeded
from testing.torch_host import quantize
from vllm_duck.models.cuda.kernels.index import Context


def index_cache(num_slots: int, *, seed: int = 0) -> Tensor:
    """Rows of 132 bytes."""
    keys = torch.randn(num_slots, 128, generator=seeded(seed))
    return torch.cat(quantize(keys), -1)


def latent_cache(num_slots: int, latent: int, rope: int, *, seed: int = 0) -> Tensor:
    """Rows of 656 bytes for 512 and 64."""
    g = seeded(seed)
    keys = torch.randn(num_slots, latent, generator=g)
    ropes = torch.randn(num_slots, rope, generator=g).to(torch.bfloat16)
    return torch.cat([*quantize(keys), ropes.view(torch.uint8)], -1)


def context_of(
    visible: list[int], *, page: int, num_blocks: int, num_requests: int = 1
) -> Context:
    """Rows in turn of the requests; blocks anywhere, some of them shared."""
    blocks = -(-max(visible, default=1) // page)
    table = torch.randint(
        0, num_blocks, (num_requests, blocks), dtype=torch.int32, generator=seeded()
    )
    return Context(
        visible=torch.tensor(visible, dtype=torch.int32),
        request_of=(torch.arange(len(visible)) % num_requests).int(),
        block_table=table,
        page=page,
    )


def slots_of(context: Context, row: int, positions: Tensor) -> Tensor:
    """positions [P] -> slots [P], int64."""
    table = context.block_table[context.request_of[row]]
    return table[positions // context.page].long() * context.page + (
        positions % context.page
    )
