"""The checkpoint on disk: official tensor names, two shards and an index.

Also the way back: reading such a folder into a TinyModel, and writing a bf16 copy
for readers that know no fp8.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.config import TinyConfig
from training.model import TinyModel
from training.quantize import dequantize_blocks, quantize_blocks
from training.tokenizer import save_tokenizer

NUM_SHARDS = 2
INDEX_NAME = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
# As in the official files: embeddings, heads, norms, router, eh_proj and the
# indexer's weights_proj stay bf16.
FP8_NAMES = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "indexer.wq_b",
    "indexer.wk",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def export(
    model: TinyModel, tokenizer: Tokenizer, folder: Path, *, fp8: bool = True
) -> None:
    """Write config, weights, tokenizer and chat template into folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    tensors = official_tensors(model)
    write_weights(quantize(tensors) if fp8 else tensors, folder)
    _write_json(folder / "config.json", config.official(fp8=fp8))
    generation = {"bos_token_id": 0, "do_sample": False, "eos_token_id": 1}
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder, config.max_position_embeddings)


def official_tensors(model: TinyModel) -> dict[str, Tensor]:
    """Return bf16 weights by official name; the router's bias stays fp32."""
    mtp_layer = f"model.layers.{model.config.num_hidden_layers}"
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith("mlp.gate_up"):
            gates, ups = value.chunk(2, 1)
            tensors.update(_split_experts(name, "gate_proj", gates))
            tensors.update(_split_experts(name, "up_proj", ups))
        elif name.endswith("mlp.down"):
            tensors.update(_split_experts(name, "down_proj", value))
        elif name == "lm_head.weight":
            tensors[name] = value
            tensors[f"{mtp_layer}.shared_head.head.weight"] = value
        else:
            tensors[f"model.{name}"] = value
    tensors[f"{mtp_layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    # Copies: safetensors refuses tensors that share memory.
    return {
        name: value.to(_stored_dtype(name), copy=True).contiguous()
        for name, value in sorted(tensors.items())
    }


def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the block-quantized matrices by e4m3 weights and their scales."""
    stored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if is_quantized(name):
            stored[name], stored[name + SCALE_SUFFIX] = quantize_blocks(value)
        else:
            stored[name] = value
    return stored


def is_quantized(name: str) -> bool:
    stem = name.removesuffix(".weight")
    return stem != name and stem.endswith(FP8_NAMES)


def write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write NUM_SHARDS safetensors files of about equal size and their index."""
    total_size = sum(_num_bytes(value) for value in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(NUM_SHARDS)]
    written = 0
    for name, value in tensors.items():
        shards[min(written * NUM_SHARDS // total_size, NUM_SHARDS - 1)][name] = value
        written += _num_bytes(value)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{NUM_SHARDS:05}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(folder / INDEX_NAME, index)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read every shard the index names and undo the fp8 blocks, to fp32."""
    index = json.loads((folder / INDEX_NAME).read_text())
    stored: dict[str, Tensor] = {}
    for file_name in sorted(set(index["weight_map"].values())):
        stored.update(load_file(folder / file_name))
    return {
        name: _restored(name, value, stored)
        for name, value in stored.items()
        if not name.endswith(SCALE_SUFFIX)
    }


def read_model(folder: Path, dtype: torch.dtype = torch.float32) -> TinyModel:
    """Load a checkpoint folder back into a TinyModel, ready to evaluate."""
    spelled = json.loads((folder / "config.json").read_text())
    config = TinyConfig.from_official(spelled)
    tensors = read_weights(folder)
    model = TinyModel(config)
    state = {
        name: _collected(name, tensors, config.n_routed_experts)
        for name in model.state_dict()
    }
    model.load_state_dict(state)
    biases = [moe.gate.e_score_correction_bias for moe in model.moe_layers()]
    model.to(dtype)
    for moe, bias in zip(model.moe_layers(), biases, strict=True):
        moe.gate.e_score_correction_bias = bias
    return model.eval()


def write_dequantized(source: Path, folder: Path) -> None:
    """Write the bf16 equal of an fp8 checkpoint, config and tokenizer included."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.to(_stored_dtype(name))
        for name, value in read_weights(source).items()
    }
    write_weights(tensors, folder)
    spelled = json.loads((source / "config.json").read_text())
    spelled.pop("quantization_config", None)
    _write_json(folder / "config.json", spelled)
    for extra in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / extra).write_bytes((source / extra).read_bytes())


def _split_experts(name: str, projection: str, stacked: Tensor) -> dict[str, Tensor]:
    prefix = f"model.{name.rpartition('.')[0]}.experts"
    return {
        f"{prefix}.{expert}.{projection}.weight": weight
        for expert, weight in enumerate(stacked)
    }


def _collected(name: str, tensors: dict[str, Tensor], num_experts: int) -> Tensor:
    """Return the official tensors behind one TinyModel parameter."""
    prefix, _, last = name.rpartition(".")

    def stacked(projection: str) -> Tensor:
        names = (f"model.{prefix}.experts.{e}.{projection}" for e in range(num_experts))
        return torch.stack([tensors[f"{expert}.weight"] for expert in names])

    if last == "gate_up":
        return torch.cat([stacked("gate_proj"), stacked("up_proj")], 1)
    if last == "down":
        return stacked("down_proj")
    return tensors[name if name.startswith("lm_head") else f"model.{name}"]


def _restored(name: str, value: Tensor, stored: dict[str, Tensor]) -> Tensor:
    scale_inv = stored.get(name + SCALE_SUFFIX)
    return value.float() if scale_inv is None else dequantize_blocks(value, scale_inv)


def _stored_dtype(name: str) -> torch.dtype:
    is_bias = name.endswith("e_score_correction_bias")
    return torch.float32 if is_bias else torch.bfloat16


def _num_bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
