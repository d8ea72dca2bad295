"""Tensors of kernels' tests: bits and numbers, and memory that nobody has written."""

import torch
from torch import Tensor

from vllm_duck.models.cuda.kernels.formats import LIFT

# How many other rows a row is tried with; of 17 on the tile is another.
COMPANIES = (3, 8, 16, 17)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(x: Tensor) -> Tensor:
    """The bf16 bits of numbers."""
    return x.to(torch.bfloat16).contiguous().view(torch.uint16)


def numbers(x: Tensor) -> Tensor:
    """Bits, or fp32 -> the numbers in float64."""
    return (x.view(torch.bfloat16) if x.dtype == torch.uint16 else x).double()


def lifted(x: Tensor) -> Tensor:
    """The bits of numbers for a matrix; exact but for the rounding to bf16."""
    return bits(x.to(torch.bfloat16).float() * LIFT)


def lowered(x: Tensor) -> Tensor:
    """The numbers in float64 that lifted bits stand for."""
    return numbers(x) / LIFT


def poisoned(*shape: int, dtype: torch.dtype = torch.uint16) -> Tensor:
    """NaN in every format, and no index: what is not written must not matter."""
    size = 1
    for length in shape:
        size *= length
    raw = torch.full((size * dtype.itemsize,), 0xFF, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Of the whole in the 2-norm; both float64."""
    assert not got.isnan().any()
    assert (got - want).norm() <= tolerance * want.norm()
