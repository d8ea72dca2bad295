"""Scratch memory is bounded: by a turn of the work, not by the length of the call."""

import numpy as np
import pytest
import torch

from testing.attention_pair import make_config, make_pair
from testing.filled import filled
from testing.host_threads import using
from testing.memory.usage import most_new_bytes
from testing.paged_world import BLOCK_SIZE, PagedWorld, make_batch, run_attention
from testing.torch_host import numpy_bits
from vllm_duck.models.cpu.attention import SparseAttention
from vllm_duck.models.cpu.linear import Linear
from vllm_duck.models.cpu.moe import Router
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.rope import Rope

MIB = 1 << 20
# Each arena rounds up to blocks of 2 MiB, and three of them hold small pieces.
SMALL_PIECES = 12 * MIB
# csrc/host/kernels/sparse.h
MAX_SCORES_BYTES = 32 * MIB
MAX_DECODED = 32 << 10


def make_world(
    num_positions: int, **changes: int
) -> tuple[SparseAttention, PagedWorld]:
    """A block whose caches hold finite noise at every position."""
    _, ours, world = make_pair(make_config(**changes))
    world.num_blocks = num_positions // BLOCK_SIZE
    world.allocate()
    torch.manual_seed(4)
    for cache in world.caches.values():
        noise = torch.randn(*cache.kv_cache.shape[:-1], cache.format.token_bytes // 2)
        cache.bind_kv_cache(noise.bfloat16().view(torch.uint8))
    return ours, world


def attend_last(
    ours: SparseAttention,
    table: torch.Tensor,
    lengths: list[int],
    new: list[int],
    hidden: torch.Tensor,
) -> torch.Tensor:
    """The last `new` rows of requests of these lengths, residual [T, H]."""
    positions = torch.cat(
        [torch.arange(n - k, n) for n, k in zip(lengths, new, strict=True)]
    )
    rotations = Rope(ours.dims.rope, ours.dims.qk_rope_head_dim).rotations(positions)
    return run_attention(ours, hidden, rotations, make_batch(new, lengths, table))[0]


def test_a_panel_at_a_long_context_holds_the_scores_of_one_turn():
    num_positions = 128 << 10
    ours, world = make_world(num_positions)
    table = torch.arange(world.num_blocks)[None]
    hidden = torch.randn(256, ours.dims.hidden_size).bfloat16()
    with using(2):
        together, held = most_new_bytes(
            lambda: attend_last(ours, table, [num_positions], [256], hidden)
        )
        alone = attend_last(ours, table, [num_positions], [1], hidden[-1:])
    # 256 rows have four times the scores that are held at once.
    assert MAX_SCORES_BYTES <= held < MAX_SCORES_BYTES + SMALL_PIECES
    assert torch.equal(together[-1:], alone)


def test_a_turn_holds_no_more_decoded_keys_than_one_long_context_has():
    length, rows, num_requests = 30 << 10, 64, 4
    ours, world = make_world(num_requests * length, index_topk=1024)
    table = torch.arange(world.num_blocks).view(num_requests, -1)
    lengths, new = [length] * num_requests, [rows] * num_requests
    hidden = torch.randn(sum(new), ours.dims.hidden_size).bfloat16()
    with using(2):
        together, held = most_new_bytes(
            lambda: attend_last(ours, table, lengths, new, hidden)
        )
        alone = [
            attend_last(ours, table[r : r + 1], [length], [rows], hidden[first:][:rows])
            for r, first in enumerate(range(0, sum(new), rows))
        ]
    decoded_bytes = 2 * MAX_DECODED * (ours.dims.kv_lora_rank + 32)
    scores_bytes = 4 * rows * length
    assert held < decoded_bytes + scores_bytes + SMALL_PIECES
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("part", ["linear", "router"])
def test_many_rows_go_through_a_linear_in_pieces(part):
    dims = Dimensions.from_hf_config(make_config(hidden_size=2048))
    module = Linear(2048, 64) if part == "linear" else Router(dims)
    filled(module)
    x = torch.randn(4096, 2048).bfloat16()

    def run(rows: torch.Tensor) -> torch.Tensor:
        return module(rows) if part == "linear" else bits_of(module(numpy_bits(rows)))

    with using(2):
        together, held = most_new_bytes(lambda: run(x))
        pieces = torch.cat([run(piece) for piece in x.split(700)])
    assert held < SMALL_PIECES < x.nbytes
    assert torch.equal(together, pieces)


def bits_of(routed: tuple[np.ndarray, np.ndarray]) -> torch.Tensor:
    ids, weights = routed
    return torch.from_numpy(np.hstack([ids, weights.view(np.int32)]))
