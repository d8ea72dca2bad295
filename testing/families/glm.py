"""A GLM-5.2 of 6 layers with random weights, as its repository would publish it in fp8.

Layers F F F S S F and the MTP layer: the lanes begin with a shared layer, as in the
real one. Names and dtypes are those of zai-org/GLM-5.2-FP8; attention heads have their
real sizes; index_topk is so small that selection matters.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from testing.filled import quantized

TOPK = 16
NUM_LAYERS = 6
KINDS = ["full", "full", "full", "shared", "shared", "full"]

CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [1, 2, 3],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 128,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk": TOPK,
    "index_topk_freq": 3,
    "index_topk_pattern": None,
    "indexer_rope_interleave": True,
    "indexer_types": KINDS,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "kv_lora_rank": 128,
    "max_position_embeddings": 4096,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 1,
    "q_lora_rank": 128,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 2048,
}

# What zai-org/GLM-5.2's config.json has otherwise, but for keys that change no size.
# Source: the same values in transformers 5.19.0, GlmMoeDsaConfig; the list of indexers
# is as index_topk_freq 4 and index_skip_topk_offset 3 say.
GLM_5_2: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 6144,
    "index_n_heads": 32,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "indexer_types": ["full"] * 2 + (["full"] + ["shared"] * 3) * 19,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "vocab_size": 154880,
}

# So small that rms_norm_eps shows.
_EMBEDDING_STD = 0.01
# What attention and MLPs add is small beside it: an indexer that was not trained has
# near-ties everywhere, and one other key in a row must not change all rows behind it.
_ATTENTION_STD, _MLP_STD = 0.002, 0.003
_IN_BF16 = ("weights_proj", "mlp.gate", "eh_proj", "lm_head", "embed_tokens")


def write_checkpoint(out_dir: Path, tokenizer_of: Path) -> Path:
    """Write config and weights, the same each time, and another model's tokenizer."""
    out_dir.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    with torch.random.fork_rng():
        torch.manual_seed(6)
        for name, shape in _shapes():
            value = _random(name, shape, generator)
            if value.dim() == 2 and not name.removesuffix(".weight").endswith(_IN_BF16):
                tensors[name], tensors[f"{name}_scale_inv"] = quantized(value)
            elif name.endswith("e_score_correction_bias"):
                tensors[name] = value
            else:
                tensors[name] = value.to(torch.bfloat16)
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "config.json").write_text(json.dumps(CONFIG, indent=2))
    for path in [*tokenizer_of.glob("*token*"), *tokenizer_of.glob("*.jinja")]:
        (out_dir / path.name).write_bytes(path.read_bytes())
    return out_dir


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * noise
    if name.endswith("embed_tokens.weight"):
        return _EMBEDDING_STD * noise
    if len(shape) == 1:
        return 0.1 * noise
    scale = shape[1] ** -0.5
    if name.endswith("o_proj.weight"):
        scale *= _ATTENTION_STD
    elif name.endswith("down_proj.weight"):
        scale *= _MLP_STD
    elif name.endswith("eh_proj.weight"):
        # The MTP layer's input, as an embedding is the trunk's.
        scale *= _EMBEDDING_STD
    return scale * noise


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer_idx in range(NUM_LAYERS + 1):
        for name, shape in _layer_shapes(layer_idx):
            yield f"model.layers.{layer_idx}.{name}", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _layer_shapes(layer_idx: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = CONFIG["hidden_size"]
    is_mtp = layer_idx == NUM_LAYERS
    if is_mtp:
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{name}.weight", (hidden,)
        yield "eh_proj.weight", (hidden, 2 * hidden)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from _attention_shapes(has_indexer=is_mtp or KINDS[layer_idx] == "full")
    if layer_idx < CONFIG["first_k_dense_replace"]:
        yield from _mlp_shapes("mlp", CONFIG["intermediate_size"])
        return
    num_experts, width = CONFIG["n_routed_experts"], CONFIG["moe_intermediate_size"]
    yield "mlp.gate.weight", (num_experts, hidden)
    yield "mlp.gate.e_score_correction_bias", (num_experts,)
    yield from _mlp_shapes("mlp.shared_experts", width)
    for expert_id in range(num_experts):
        yield from _mlp_shapes(f"mlp.experts.{expert_id}", width)


def _attention_shapes(*, has_indexer: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    c = CONFIG
    hidden, low, latent = c["hidden_size"], c["q_lora_rank"], c["kv_lora_rank"]
    heads, rope = c["num_attention_heads"], c["qk_rope_head_dim"]
    nope, value = c["qk_nope_head_dim"], c["v_head_dim"]
    yield "self_attn.q_a_proj.weight", (low, hidden)
    yield "self_attn.q_a_layernorm.weight", (low,)
    yield "self_attn.q_b_proj.weight", (heads * (nope + rope), low)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * value)
    if has_indexer:
        index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
        yield "self_attn.indexer.wq_b.weight", (index_heads * index_dim, low)
        yield "self_attn.indexer.wk.weight", (index_dim, hidden)
        yield "self_attn.indexer.weights_proj.weight", (index_heads, hidden)
        yield "self_attn.indexer.k_norm.weight", (index_dim,)
        yield "self_attn.indexer.k_norm.bias", (index_dim,)


def _mlp_shapes(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = CONFIG["hidden_size"]
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
