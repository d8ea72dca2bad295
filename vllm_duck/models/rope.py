"""Rotary position embedding: plain and YaRN, one table for every layer.

All rotations here are interleaved: channels 2i and 2i+1 turn by one angle, so a
head is a vector of complex numbers. The indexer of DeepSeek-V3.2 is trained with
the half-split (NeoX) layout instead; its weights are permuted to the interleaved
one when they are loaded (`half_split_to_interleaved`), which leaves the indexer's
dot products as they are. One rotation then serves queries, keys and indexer.
"""

import math

import torch
from torch import Tensor

from vllm_duck.models.dimensions import RopeSettings


class Rope:
    """Angles of every position, computed when they are asked for.

    Source: DeepSeek-V3.2 inference/model.py::precompute_freqs_cis; YaRN is
    arXiv:2309.00071. transformers 5 rounds cos and sin to bf16; here they stay fp32.
    """

    def __init__(self, settings: RopeSettings, rotary_dim: int) -> None:
        self.inv_freq = inverse_frequencies(settings, rotary_dim)
        self.magnitude = _magnitude(settings)

    def rotations(self, positions: Tensor) -> Tensor:
        """positions [T] int64 -> [T, 1, rotary_dim / 2] complex64."""
        angles = positions.to(torch.float32)[:, None] * self.inv_freq.to(
            positions.device
        )
        return torch.polar(torch.full_like(angles, self.magnitude), angles)[:, None]


def half_split_to_interleaved(rotary_dim: int) -> Tensor:
    """The order that moves channel i and i + rotary_dim/2 side by side, int64."""
    return torch.arange(rotary_dim).view(2, rotary_dim // 2).t().flatten()


def softmax_scale(settings: RopeSettings, qk_head_dim: int) -> float:
    """The scale of attention logits; YaRN's mscale enters squared."""
    scale = qk_head_dim**-0.5
    if settings.is_yarn and settings.mscale_all_dim:
        scale *= _mscale(settings.factor, settings.mscale_all_dim) ** 2
    return scale


def inverse_frequencies(settings: RopeSettings, rotary_dim: int) -> Tensor:
    """[rotary_dim / 2] fp32, radians per position."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    extrapolated = 1.0 / settings.theta**exponents
    if not settings.is_yarn:
        return extrapolated
    low = math.floor(_correction_dim(settings.beta_fast, settings, rotary_dim))
    high = math.ceil(_correction_dim(settings.beta_slow, settings, rotary_dim))
    low, high = max(low, 0), min(high, rotary_dim - 1)
    steps = torch.arange(rotary_dim // 2, dtype=torch.float32) - low
    ramp = (steps / max(high - low, 0.001)).clamp(0, 1)
    return extrapolated / settings.factor * ramp + extrapolated * (1 - ramp)


def _correction_dim(turns: float, settings: RopeSettings, rotary_dim: int) -> float:
    """The channel pair that makes `turns` rotations over the original context."""
    wavelengths = settings.original_max_position / (turns * 2 * math.pi)
    return rotary_dim * math.log(wavelengths) / (2 * math.log(settings.theta))


def _magnitude(settings: RopeSettings) -> float:
    """The length of the rotated vector; 1 in every official checkpoint."""
    if not settings.is_yarn:
        return 1.0
    if settings.mscale and settings.mscale_all_dim:
        return _mscale(settings.factor, settings.mscale) / _mscale(
            settings.factor, settings.mscale_all_dim
        )
    return _mscale(settings.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
