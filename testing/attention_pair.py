"""transformers' attention and ours with the same weights, and its configurations."""

import torch
import torch.nn.functional as F
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32RotaryEmbedding,
)

from testing.filled import quantized
from testing.paged_world import PagedWorld
from vllm_duck.models.cpu.attention import SparseAttention
from vllm_duck.models.cpu.packing import pack_modules
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches
from vllm_duck.models.matrix import Matrix

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
        architectures=["DeepseekV32ForCausalLM"],
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


def make_pair(config, kv_dtype="bf16", seed=0, weights=None, *, is_coded=False):
    """transformers' module in fp32 with bf16-valued weights, and ours.

    `weights` is an oracle whose weights both take. is_coded: matrices are e4m3 codes
    with scales, but for the indexer's head weights; bf16 in every checkpoint.
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
        parameter = parameters[name.removeprefix("attn.")]
        if is_coded and isinstance(view, Matrix) and "weights_proj" not in name:
            view.put(name, *quantized(parameter.data))
            parameter.data = view.values()
        else:
            view.copy_(parameter.data)
    for norm in (ours.input_norm, ours.output_norm):
        norm.weight.data.fill_(1.0)
    pack_modules(ours)
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
