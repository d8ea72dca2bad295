"""Our paged sparse attention against transformers' DeepseekV32Attention in fp32."""

import pytest
import torch

from testing.attention_pair import (
    PLAIN,
    TOPK,
    YARN,
    make_config,
    make_pair,
    oracle_forward,
)
from testing.host_threads import using
from testing.paged_world import (
    BLOCK_SIZE,
    make_batch,
    run_attention,
)
from vllm_duck.errors import DuckCheckpointError
from vllm_duck.models.cpu import _host
from vllm_duck.models.cpu.attention import SparseAttention
from vllm_duck.models.rope import Rope

ISAS = _host.supported_isas()


def attend(ours, hidden, rotations, batch):
    """The block's output without its residual, [T, H] fp32."""
    with torch.inference_mode():
        residual, _ = run_attention(ours, hidden, rotations, batch)
    return residual.float() - hidden.float()


def run_ours(ours, world, config, sequences, chunks):
    """Feed the sequences in steps; chunks[step][request] = new tokens."""
    dims = ours.dims
    rope = Rope(dims.rope, dims.qk_rope_head_dim)
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randperm(world.num_blocks, generator=generator)
    per_request = -(-max(map(len, sequences)) // BLOCK_SIZE)
    table = blocks[: per_request * len(sequences)].view(len(sequences), per_request)
    done = [0] * len(sequences)
    outputs = [[] for _ in sequences]
    for step in chunks:
        active = [r for r, new in enumerate(step) if new]
        new = [step[r] for r in active]
        pieces = [sequences[r][done[r] : done[r] + step[r]] for r in active]
        positions = torch.cat(
            [torch.arange(done[r], done[r] + step[r]) for r in active]
        )
        for r in active:
            done[r] += step[r]
        batch = make_batch(new, [done[r] for r in active], table[active])
        out = attend(ours, torch.cat(pieces), rope.rotations(positions), batch)
        for r, piece in zip(active, out.split(new), strict=True):
            outputs[r].append(piece)
    return [torch.cat(parts) for parts in outputs]


def row_errors(got, expected):
    return (got.float() - expected).norm(dim=1) / expected.norm(dim=1)


def assert_rows_close(got, expected, typical, share_of_outliers=0.1):
    """bf16 rounding moves every row a little, and a near-tie in the selection moves
    a few rows a lot: one of 16 keys is another. A wrong selection moves most rows."""
    errors = row_errors(got, expected)
    assert errors.median() < typical
    assert (errors > 5 * typical).float().mean() <= share_of_outliers


@pytest.mark.parametrize("is_coded", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("rope", [YARN, PLAIN], ids=["yarn", "plain"])
@pytest.mark.parametrize("num_tokens", [TOPK // 2, 8 * TOPK, 20 * TOPK])
def test_attention_matches_transformers(rope, num_tokens, is_coded):
    config = make_config(rope)
    oracle, ours, world = make_pair(config, is_coded=is_coded)
    hidden = torch.randn(num_tokens, config.hidden_size).bfloat16()
    expected = oracle_forward(oracle, config, hidden)
    (got,) = run_ours(ours, world, config, [hidden], [[num_tokens]])
    assert_rows_close(
        got, expected, typical=0.015, share_of_outliers=0.12 if is_coded else 0.1
    )


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize(("nope_dim", "v_head_dim"), [(192, 256), (96, 64)])
def test_scale_blocks_of_e4m3_may_begin_within_a_head(nope_dim, v_head_dim, name):
    """448 rows a head, as other models have them, or 160; one row, few and a panel."""
    config = make_config(
        kv_lora_rank=256, qk_nope_head_dim=nope_dim, v_head_dim=v_head_dim
    )
    oracle, ours, world = make_pair(config, is_coded=True)
    hidden = torch.randn(TOPK, config.hidden_size).bfloat16()
    expected = oracle_forward(oracle, config, hidden)
    with using(2, name, work_per_thread=1):
        for chunks in ([[1], [3], [TOPK - 4]], [[TOPK]]):
            (got,) = run_ours(ours, world, config, [hidden], chunks)
            # All keys are selected, so no near-tie moves a row.
            assert row_errors(got, expected).max() < 0.03


def test_heads_of_e4m3_begin_with_whole_tiles():
    config = make_config(qk_nope_head_dim=40, v_head_dim=32)
    with pytest.raises(DuckCheckpointError, match="begin at multiples of 32 rows"):
        make_pair(config, is_coded=True)


def test_a_wrong_selection_shows(monkeypatch):
    config = make_config()
    # The half-split rotation that the indexer must not get.
    monkeypatch.setattr(SparseAttention, "_interleave_index_rope", lambda self: None)
    oracle, ours, world = make_pair(config)
    hidden = torch.randn(20 * TOPK, config.hidden_size).bfloat16()
    expected = oracle_forward(oracle, config, hidden)
    (got,) = run_ours(ours, world, config, [hidden], [[20 * TOPK]])
    errors = row_errors(got, expected)
    assert (errors[4 * TOPK :] > 0.075).float().mean() > 0.5
    assert errors[:TOPK].max() < 0.075


def test_fp8_caches_stay_within_their_rounding():
    config = make_config()
    oracle, ours, world = make_pair(config, kv_dtype="fp8")
    hidden = torch.randn(8 * TOPK, config.hidden_size).bfloat16()
    expected = oracle_forward(oracle, config, hidden)
    (got,) = run_ours(ours, world, config, [hidden], [[8 * TOPK]])
    # e4m3 has 3 mantissa bits: a relative error up to 2**-4 in each cached value,
    # a third of it on average, and selections near a tie change more often. The torch
    # reference with the same cache is off by 0.041 here.
    assert_rows_close(got, expected, typical=0.045, share_of_outliers=0.15)
