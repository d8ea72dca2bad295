"""The sizes of DeepSeek-V3.2, as its config.json has them."""

import json
from pathlib import Path

import pytest

from vllm_duck.plan.sizes import Sizes, read_sizes

# https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/config.json, but for keys
# that no size depends on.
V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.fixture
def config(tmp_path) -> Path:
    """DeepSeek-V3.2's config.json, alone in a directory."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(V32))
    return path


@pytest.fixture
def sizes(config) -> Sizes:
    return read_sizes(config)
