"""Matrices as a checkpoint has them, and their products in float64."""

import torch
from torch import Tensor

from testing.gpu.numbers import seeded
from vllm_duck.models.matrix import E4M3, Matrix


def coded(rows: int, columns: int, *, seed: int = 0) -> Matrix:
    """e4m3 with every code but NaN among them, subnormals too."""
    g = seeded(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=g).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 3
    blocks = -(-rows // 128), -(-columns // 128)
    matrix = Matrix(rows, columns)
    matrix.put("coded", codes.view(E4M3), torch.rand(blocks, generator=g) * 1e-3)
    return matrix


def plain(rows: int, columns: int, *, seed: int = 0) -> Matrix:
    """bf16."""
    matrix = Matrix(rows, columns)
    weight = torch.randn(rows, columns, generator=seeded(seed)) * columns**-0.5
    matrix.put("plain", weight.to(torch.bfloat16), None)
    return matrix


def product(x: Tensor, *parts: Matrix) -> Tensor:
    """x [T, K] float64 times the matrices, one below the other."""
    return torch.cat([x @ part.values().double().T for part in parts], 1)
