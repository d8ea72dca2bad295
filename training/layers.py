"""The small building blocks: norms, rotary positions, the gated MLP, the experts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import TinyConfig


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm with one saved tensor: autograd's own chain costs 3x here in bf16."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = (wide * inverse).to(x.dtype)
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        grad_weight = (grad * normed).reshape(-1, weight.numel())
        wide = normed.float()
        scaled = (grad * weight).float()
        grad_x = inverse * (scaled - wide * (scaled * wide).mean(-1, keepdim=True))
        return (
            grad_x.to(grad.dtype),
            grad_weight.sum(0, dtype=torch.float32).to(weight.dtype),
            None,
        )


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNormFunction.apply(x, self.weight, self.eps)


def linear(width_in: int, width_out: int) -> nn.Linear:
    """Make a bias-free projection with a spread that suits a narrow model."""
    layer = nn.Linear(width_in, width_out, bias=False)
    nn.init.normal_(layer.weight, std=0.5 / math.sqrt(width_in))
    return layer


def yarn_frequencies(config: TinyConfig) -> Tensor:
    """Return the YaRN rotary frequencies [qk_rope_head_dim / 2], fp32.

    Source: YaRN (arXiv 2309.00071) with DeepSeek-V3's beta_fast 32, beta_slow 1.
    mscale equals mscale_all_dim, so cos and sin are not scaled; the softmax is.
    """
    width = config.qk_rope_head_dim

    def dim_of(rotations: float) -> float:
        ratio = config.rope_original_positions / (rotations * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dim_of(32)), 0)
    high = min(math.ceil(dim_of(1)), width - 1)
    steps = torch.arange(width // 2, dtype=torch.float32)
    stretched = ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = config.rope_theta ** (-2 * steps / width)
    return plain * (1 - stretched) + plain / config.rope_factor * stretched


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs (the main attention's layout).

    The result comes out half-split. Queries and keys are reordered alike, so their
    dot products are those of the interleaved layout.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate first half against second half (the indexer's NeoX layout)."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return swiglu_backward(grad, *ctx.saved_tensors)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    silu = sigmoid * gate
    return torch.cat([grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu], -1)


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(width, inner)
        self.up_proj = linear(width, inner)
        self.down_proj = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = torch.cat([self.gate_proj.weight, self.up_proj.weight])
        return self.down_proj(_SwiGLU.apply(F.linear(x, gate_up)))
