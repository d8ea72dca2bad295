"""Our paged sparse attention against transformers' DeepseekV32Attention in fp32."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32RotaryEmbedding,
)

from tests.models.conftest import (
    BLOCK_SIZE,
    PagedWorld,
    make_batch,
    run_attention,
)
from vllm_duck.models.cpu.attention import SparseAttention
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches
from vllm_duck.models.packing import finish_loading
from vllm_duck.models.rope import Rope

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
TOPK = 16


def make_config(rope=None, **changes):
    settings = dict(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        head_dim=32,
        index_n_heads=4,
        index_head_dim=128,
        index_topk=TOPK,
        intermediate_size=128,
        moe_intermediate_size=64,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        hidden_act="silu",
        rope_parameters=dict(rope or YARN),
    )
    config = DeepseekV32Config(**{**settings, **changes})
    config._attn_implementation = "eager"
    return config


def make_pair(config, kv_dtype="bf16", seed=0, weights=None):
    """transformers' module in fp32 with bf16-valued weights, and ours.

    `weights` is an oracle whose weights both take.
    """
    torch.manual_seed(seed)
    oracle = DeepseekV32Attention(config, 0).eval()
    for name, parameter in oracle.named_parameters():
        scale = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        noise = torch.randn_like(parameter) * (0.1 if scale else 0.3)
        if parameter.dim() == 2:
            noise = torch.randn_like(parameter) * 1.5 * parameter.shape[1] ** -0.5
        parameter.data = (scale + noise).bfloat16().float()
    # Large beside the residual, whose rounding then does not show.
    oracle.o_proj.weight.data *= 64
    if weights is not None:
        oracle.load_state_dict(weights.state_dict())
    world = PagedWorld()
    with world.building():
        dims = Dimensions.from_hf_config(config)
        ours = SparseAttention(dims, LayerCaches.of(dims, kv_dtype, "model.layers.0"))
    parameters = dict(oracle.named_parameters())
    for name, view in ours.checkpoint_views("attn"):
        view.copy_(parameters[name.removeprefix("attn.")])
    for norm in (ours.input_norm, ours.output_norm):
        norm.weight.data.fill_(1.0)
    finish_loading(ours)
    world.allocate()
    return oracle, ours, world


def oracle_forward(oracle, config, hidden):
    """hidden [T, H] of one sequence, no cache."""
    num_tokens = hidden.shape[0]
    positions = torch.arange(num_tokens)[None]
    mask = torch.full((num_tokens, num_tokens), float("-inf")).triu(1)[None, None]
    rope = DeepseekV32RotaryEmbedding(config)
    normed = F.rms_norm(hidden.float(), (config.hidden_size,), eps=1e-6)
    with torch.inference_mode():
        out, _ = oracle(normed[None], rope(normed, positions), mask)
    return out[0]


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


@pytest.mark.parametrize("rope", [YARN, PLAIN], ids=["yarn", "plain"])
@pytest.mark.parametrize("num_tokens", [TOPK // 2, 8 * TOPK, 20 * TOPK])
def test_attention_matches_transformers(rope, num_tokens):
    config = make_config(rope)
    oracle, ours, world = make_pair(config)
    hidden = torch.randn(num_tokens, config.hidden_size).bfloat16()
    expected = oracle_forward(oracle, config, hidden)
    (got,) = run_ours(ours, world, config, [hidden], [[num_tokens]])
    assert_rows_close(got, expected, typical=0.015)


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
