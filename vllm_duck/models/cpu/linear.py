"""Norms, linears and the SwiGLU MLP of the host."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vllm_duck.errors import DuckShapeError
from vllm_duck.models.cpu import _host
from vllm_duck.models.cpu.packing import HostModule, pack
from vllm_duck.models.cpu.threads import (
    Bits,
    Handle,
    current,
    require_bits,
    require_rows,
)
from vllm_duck.models.matrix import Matrix

Floats = npt.NDArray[np.float32]


def weight_parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class MergedLinear:
    """The weights of several checkpoint linears on one input, one below the other.

    `parts` maps each checkpoint name to its number of output rows.
    """

    def __init__(self, in_features: int, parts: dict[str, int]) -> None:
        self.parts = {name: Matrix(rows, in_features) for name, rows in parts.items()}

    @property
    def matrices(self) -> list[Matrix]:
        return list(self.parts.values())

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Matrix]]:
        for name, matrix in self.parts.items():
            yield f"{prefix}.{name}.weight", matrix


class Norm(HostModule):
    """RMS norm, computed in fp32 and rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = weight_parameter(size)
        self.eps = eps
        self.packed: Handle

    def forward(self, x: Tensor) -> Tensor:
        """x [T, size] bf16 -> [T, size] bf16."""
        x = require_rows("x", x, self.weight.shape[0])
        out = torch.empty_like(x)
        _host.norm(current(), self.packed, x.shape[0], x.data_ptr(), out.data_ptr())
        return out

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight.data

    def finish_loading(self) -> None:
        size = self.weight.shape[0]
        self.packed = _host.norm_new(floats(self.weight), size, self.eps)


class Linear(HostModule):
    """A linear without bias; accumulates in fp32."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = Matrix(out_features, in_features)
        self.packed: Handle

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] bf16 -> [T, out] bf16."""
        return apply_linear(self.packed, x, self.in_features, self.out_features)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Matrix]]:
        yield f"{prefix}.weight", self.weight

    def finish_loading(self) -> None:
        self.packed = pack_linear(self.weight)
        del self.weight


def pack_linear(weight: Matrix) -> Handle:
    return pack(_host.linear_new, k=weight.shape[1], weight=[weight])


def apply_linear(
    packed: Handle,
    x: Tensor,
    in_features: int,
    out_features: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x [T, in] bf16 -> [T, out], rounded once to bf16, or fp32 as accumulated."""
    x = require_rows("x", x, in_features)
    out = torch.empty(x.shape[0], out_features, dtype=dtype)
    is_bf16 = dtype == torch.bfloat16
    _host.linear(current(), packed, x.shape[0], x.data_ptr(), is_bf16, out.data_ptr())
    return out


class Mlp(HostModule):
    """SwiGLU: a dense layer's MLP, or the shared expert of an MoE layer."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.gate_proj = Matrix(intermediate_size, hidden_size)
        self.up_proj = Matrix(intermediate_size, hidden_size)
        self.down_proj = Matrix(hidden_size, intermediate_size)
        self.packed: Handle

    def forward(self, x: Bits) -> Floats:
        """x [T, H] bf16 bits -> [T, H] fp32.

        Raises:
            DuckShapeError: x has another shape, dtype or layout.
        """
        require_bits("x", x, self.hidden_size)
        out = np.empty(x.shape, np.float32)
        _host.mlp(current(), self.packed, x.shape[0], x, 0, out)
        return out

    def add_to(self, residual: Bits, x: Bits) -> Bits:
        """residual [T, H] bf16 bits plus the MLP of x, rounded once.

        Raises:
            DuckShapeError: one of them has another shape, dtype or layout.
        """
        require_bits("x", x, self.hidden_size)
        require_bits("residual", residual, self.hidden_size)
        if residual.shape != x.shape:
            raise DuckShapeError(
                f"residual must have the rows of x, {x.shape}, got {residual.shape}"
            )
        out = np.empty_like(residual)
        _host.mlp(current(), self.packed, x.shape[0], x, residual, out)
        return out

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Matrix]]:
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{prefix}.{name}.weight", getattr(self, name)

    def finish_loading(self) -> None:
        self.packed = pack(
            _host.mlp_new,
            hidden_size=self.hidden_size,
            columns=self.intermediate_size,
            gate=[self.gate_proj],
            up=[self.up_proj],
            down=[self.down_proj],
        )
        del self.gate_proj, self.up_proj, self.down_proj


def floats(parameter: Tensor) -> Floats:
    """A copy in fp32."""
    copied: Floats = parameter.detach().to(torch.float32).numpy().copy()
    return copied
