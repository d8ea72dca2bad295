"""Checkpoints of any size with random weights, and drafts accepted as often as asked.

The layers compute in full, but their outputs are scaled down to almost nothing, so the
next token depends on the current one alone: `lm_head` maps each token to its successor
on one long cycle. The MTP layer's own head knows the successors of the share
`acceptance` of all tokens, and errs on the rest.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.common import MODEL_DIR

# What the layers add is of this size beside an embedding.
_QUIET = 1e-4
_POOL_SIZE = 1 << 22


@dataclass(frozen=True)
class Sizes:
    """Names as in config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    acceptance: float = 0.85


# A stage of either side takes about a millisecond on one core.
WIDE = Sizes(
    hidden_size=1024,
    num_hidden_layers=12,
    num_attention_heads=16,
    q_lora_rank=512,
    intermediate_size=2048,
    moe_intermediate_size=512,
    n_routed_experts=16,
    num_experts_per_tok=8,
)
# The widths of the bundled model at the depth of the real one.
DEEP = Sizes(
    hidden_size=256,
    num_hidden_layers=59,
    num_attention_heads=4,
    q_lora_rank=256,
    intermediate_size=640,
    moe_intermediate_size=128,
    n_routed_experts=16,
    num_experts_per_tok=4,
)


def write_random_model(sizes: Sizes, out_dir: Path) -> Path:
    """Write a bf16 checkpoint; vocabulary and tokenizer are the bundled model's."""
    config = json.loads((MODEL_DIR / "config.json").read_text())
    del config["quantization_config"]
    config.update(
        {name: value for name, value in vars(sizes).items() if name in config},
        num_key_value_heads=sizes.num_attention_heads,
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    weight_map = {}
    for layer_idx in range(sizes.num_hidden_layers + 1):
        file_name = f"model-{layer_idx:05d}.safetensors"
        tensors = dict(_layer(config, layer_idx))
        if layer_idx == sizes.num_hidden_layers:
            tensors.update(_ends(config, sizes.acceptance))
        save_file(tensors, out_dir / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file_name))
    (out_dir / "config.json").write_text(json.dumps(config))
    index = json.dumps({"weight_map": weight_map})
    (out_dir / "model.safetensors.index.json").write_text(index)
    for path in [*MODEL_DIR.glob("token*"), MODEL_DIR / "chat_template.jinja"]:
        (out_dir / path.name).write_bytes(path.read_bytes())
    return out_dir


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    """From a pool, at a random place: drawing gigabytes would take minutes."""
    size = math.prod(shape)
    begin = int(torch.randint(_POOL_SIZE, ()))
    values = _pool().repeat(2 + size // _POOL_SIZE)[begin : begin + size]
    return values.view(shape) * (scale / shape[-1] ** 0.5)


@functools.cache
def _pool() -> Tensor:
    return torch.randn(_POOL_SIZE).bfloat16()


def _ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def _mlp(hidden: int, columns: int) -> Iterator[tuple[str, Tensor]]:
    yield "gate_proj", _random(columns, hidden)
    yield "up_proj", _random(columns, hidden)
    yield "down_proj", _random(hidden, columns, scale=_QUIET)


def _layer(config: dict[str, Any], layer_idx: int) -> Iterator[tuple[str, Tensor]]:
    prefix = f"model.layers.{layer_idx}"
    hidden = config["hidden_size"]
    for name, tensor in _attention(config):
        yield f"{prefix}.self_attn.{name}", tensor
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", _ones(hidden)
    if layer_idx < config["first_k_dense_replace"]:
        for name, tensor in _mlp(hidden, config["intermediate_size"]):
            yield f"{prefix}.mlp.{name}.weight", tensor
        return
    num_experts, columns = config["n_routed_experts"], config["moe_intermediate_size"]
    yield f"{prefix}.mlp.gate.weight", _random(num_experts, hidden)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", torch.zeros(num_experts)
    for name, tensor in _mlp(hidden, columns * config["n_shared_experts"]):
        yield f"{prefix}.mlp.shared_experts.{name}.weight", tensor
    for expert in range(num_experts):
        for name, tensor in _mlp(hidden, columns):
            yield f"{prefix}.mlp.experts.{expert}.{name}.weight", tensor


def _attention(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_lora, kv_lora = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (
        config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v")
    )
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    yield "q_a_proj.weight", _random(q_lora, hidden)
    yield "q_a_layernorm.weight", _ones(q_lora)
    yield "q_b_proj.weight", _random(heads * (nope + rope), q_lora)
    yield "kv_a_proj_with_mqa.weight", _random(kv_lora + rope, hidden)
    yield "kv_a_layernorm.weight", _ones(kv_lora)
    yield "kv_b_proj.weight", _random(heads * (nope + value), kv_lora)
    yield "o_proj.weight", _random(hidden, heads * value, scale=_QUIET)
    yield "indexer.wq_b.weight", _random(index_heads * index_dim, q_lora)
    yield "indexer.wk.weight", _random(index_dim, hidden)
    yield "indexer.k_norm.weight", torch.ones(index_dim)
    yield "indexer.k_norm.bias", torch.zeros(index_dim)
    yield "indexer.weights_proj.weight", _random(index_heads, hidden)


def _ends(config: dict[str, Any], acceptance: float) -> Iterator[tuple[str, Tensor]]:
    """Embedding, heads, and what joins the MTP layer to the trunk."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    prefix = f"model.layers.{config['num_hidden_layers']}"
    embedding = torch.nn.functional.normalize(torch.randn(vocab, hidden)) * hidden**0.5
    # The special tokens stay out of the cycle.
    cycle = 16 + torch.randperm(vocab - 16)
    head = torch.zeros(vocab, hidden)
    head[cycle.roll(-1)] = embedding[cycle]
    # Of the other successors the MTP layer knows only wrong ones.
    is_known = torch.rand(len(cycle)) < acceptance
    known = cycle[is_known]
    unknown = cycle[~is_known]
    successor = torch.empty(vocab, dtype=torch.int64)
    successor[cycle] = cycle.roll(-1)
    draft_head = torch.zeros(vocab, hidden)
    draft_head[successor[known]] = embedding[known]
    draft_head[successor[unknown]] = embedding[unknown.roll(1)]
    projection = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    for name, tensor in {
        "model.embed_tokens": embedding,
        "model.norm": torch.ones(hidden),
        "lm_head": head,
        f"{prefix}.enorm": torch.ones(hidden),
        f"{prefix}.hnorm": torch.ones(hidden),
        f"{prefix}.eh_proj": projection,
        f"{prefix}.shared_head.norm": torch.ones(hidden),
        f"{prefix}.shared_head.head": draft_head,
        f"{prefix}.embed_tokens": embedding.clone(),
    }.items():
        yield f"{name}.weight", tensor.bfloat16()
