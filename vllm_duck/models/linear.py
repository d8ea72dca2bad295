"""Linear layers of the host: bf16, fused where layers share their input."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [out, in], in the dtype of both; returns [T, out].

    A lone row is padded to two: torch's CPU GEMM takes another path for one row and
    rounds differently there, so a token would depend on its company in the batch.
    """
    if x.shape[0] == 1 and x.device.type == "cpu":
        return F.linear(x.expand(2, -1), weight)[:1]
    return F.linear(x, weight)


class FusedLinear(nn.Module):
    """Several checkpoint linears on one input, as one GEMM.

    `parts` maps each checkpoint name to its number of output rows.
    """

    def __init__(self, in_features: int, parts: dict[str, int]) -> None:
        super().__init__()
        self.parts = parts
        rows = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(rows, in_features), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, in] -> one [T, rows] view per part."""
        return linear(x, self.weight).split(tuple(self.parts.values()), -1)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        row = 0
        for name, num_rows in self.parts.items():
            yield f"{prefix}.{name}.weight", self.weight.data[row : row + num_rows]
            row += num_rows


class Mlp(nn.Module):
    """SwiGLU: a dense layer's MLP, or the shared expert of an MoE layer."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = FusedLinear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
        )
        self.down = FusedLinear(intermediate_size, {"down_proj": hidden_size})

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        (out,) = self.down(F.silu(gate) * up)
        return out

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.gate_up.checkpoint_views(prefix)
        yield from self.down.checkpoint_views(prefix)


class Norm(nn.Module):
    """RMS norm, computed in fp32 and rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight.data
