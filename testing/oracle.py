"""The same weights for the peers: a checkpoint without fp8, for transformers and vLLM.

transformers' classes, as DeepseekV32ForCausalLM, were written independently of this
project and of DeepSeek's own code: the reference for every number of the trunk.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 128
_SPARSE_KEYS = ("index_n_heads", "index_head_dim", "index_topk")


def dequantized(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by name, e4m3 ones as their fp32 products."""
    with ExitStack() as files:
        holders = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            file = files.enter_context(safe_open(path, framework="pt"))
            holders.update(dict.fromkeys(file.keys(), file))
        for name, file in holders.items():
            if name.endswith("_scale_inv"):
                continue
            tensor = file.get_tensor(name)
            if tensor.dtype == torch.float8_e4m3fn:
                scale_name = f"{name}_scale_inv"
                scale = holders[scale_name].get_tensor(scale_name)
                tensor = _times_blocks(tensor.float(), scale)
            yield name, tensor


def write_dequantized(
    model_dir: Path,
    out_dir: Path,
    dtype: torch.dtype,
    *,
    as_dense_v3: bool = False,
    with_mtp: bool = False,
) -> Path:
    """Write the checkpoint without fp8, and without its MTP layer unless asked for.

    `as_dense_v3`: drop the indexer too and call it DeepseekV3ForCausalLM, which stock
    vLLM runs on a CPU.
    """
    config = json.loads((model_dir / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    tensors = {
        name: tensor if "e_score_correction" in name else tensor.to(dtype)
        for name, tensor in dequantized(model_dir)
        if (with_mtp or not name.startswith(f"model.layers.{num_layers}."))
        and not (as_dense_v3 and ".indexer." in name)
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    if not with_mtp:
        config["num_nextn_predict_layers"] = 0
    _write_config(config, out_dir, as_dense_v3)
    for path in model_dir.glob("*token*"):
        (out_dir / path.name).write_bytes(path.read_bytes())
    template = model_dir / "chat_template.jinja"
    (out_dir / template.name).write_bytes(template.read_bytes())
    return out_dir


def load_transformers(checkpoint_dir: Path, dtype: torch.dtype) -> Any:
    import transformers

    config = json.loads((checkpoint_dir / "config.json").read_text())
    (architecture,) = config["architectures"]
    # By its class: where vLLM is imported, transformers' Auto classes read
    # DeepseekV32ForCausalLM as the dense DeepSeek-V3.
    return (
        getattr(transformers, architecture)
        .from_pretrained(checkpoint_dir, dtype=dtype, attn_implementation="eager")
        .eval()
    )


def _write_config(config: dict[str, Any], out_dir: Path, as_dense_v3: bool) -> None:
    config = {k: v for k, v in config.items() if k != "quantization_config"}
    if as_dense_v3:
        config = {k: v for k, v in config.items() if k not in _SPARSE_KEYS}
        config["architectures"] = ["DeepseekV3ForCausalLM"]
        config["model_type"] = "deepseek_v3"
    (out_dir / "config.json").write_text(json.dumps(config, indent=2))


def _times_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    rows = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return weight * rows.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]


def transformers_logits(
    model_dir: Path, sequences: Sequence[Sequence[int]]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Teacher-forced logits in fp32 and in bf16, [T, vocab] fp32 per sequence."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as directory:
            checkpoint_dir = write_dequantized(model_dir, Path(directory), dtype)
            model = load_transformers(checkpoint_dir, dtype)
        with torch.inference_mode():
            results.append(
                [model(torch.tensor([s])).logits[0].float().numpy() for s in sequences]
            )
    return results[0], results[1]
