"""Parts of the host with random weights, bf16 or e4m3."""

from typing import Any

import torch
from torch import Tensor

from vllm_duck.models.cpu.packing import pack_modules
from vllm_duck.models.matrix import BLOCK, E4M3, Matrix


def filled(part: Any, std: float = 0.1, *, is_coded: bool = False) -> dict[str, Tensor]:
    """Fill and pack a part; returns the values of its weights by name, fp32."""
    values = {}
    for name, view in part.checkpoint_views(""):
        noise = torch.randn(view.shape) * std
        if isinstance(view, Matrix) and is_coded:
            view.put(name, *quantized(noise))
        else:
            view.copy_(noise)
        taken = view.values() if isinstance(view, Matrix) else view.float().clone()
        values[name.removeprefix(".").removesuffix(".weight")] = taken
    pack_modules(part)
    return values


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of each 128 x 128; every block's scale is another."""
    num_rows, num_columns = (-(-size // BLOCK) for size in weight.shape)
    largest = weight.abs().max() / 448
    scale = largest * (1 + torch.rand(num_rows, num_columns))
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    return (weight / wide).clamp(-448, 448).to(E4M3), scale
