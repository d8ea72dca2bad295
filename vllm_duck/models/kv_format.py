"""The bytes of one token in the two paged caches: packing and unpacking.

    latent, fp8:  [512 e4m3 | 4 fp32 scales, one per 128 | 64 bf16 rope]   656 bytes
    latent, bf16: [512 bf16 | 64 bf16 rope]                              1,152 bytes
    index, fp8:   [128 e4m3 | 1 fp32 scale]                                132 bytes
    index, bf16:  [128 bf16]                                               256 bytes

for kv_lora_rank 512, qk_rope_head_dim 64 and index_head_dim 128. A cached value is
the scale times the e4m3 number; scale = max |x| / 448 over its tile.
Source: the layout is vLLM's "fp8_ds_mla" (DeepSeek-V3.2, FlashMLA).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KvDtype = Literal["fp8", "bf16"]

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
TILE = 128


@dataclass(frozen=True)
class LatentFormat:
    """One token of the MLA cache: latent [L] and rotated key [R]."""

    latent_dim: int
    rope_dim: int
    dtype: KvDtype

    @property
    def token_bytes(self) -> int:
        if self.dtype == "bf16":
            return 2 * (self.latent_dim + self.rope_dim)
        return self.latent_dim + 4 * (self.latent_dim // TILE) + 2 * self.rope_dim

    def pack(self, latent: Tensor, rope: Tensor) -> Tensor:
        """latent [T, L] and rope [T, R], bf16 or fp32 -> [T, token_bytes] uint8."""
        rope_bytes = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
        if self.dtype == "bf16":
            latent_bytes = latent.to(torch.bfloat16).contiguous().view(torch.uint8)
            return torch.cat([latent_bytes, rope_bytes], -1)
        values, scales = _quantize(latent)
        return torch.cat([values, scales, rope_bytes], -1)

    def unpack(self, rows: Tensor) -> Tensor:
        """[..., token_bytes] uint8 -> keys [..., L + R] bf16; values are [..., :L]."""
        if self.dtype == "bf16":
            return rows.view(torch.bfloat16)
        scales_end = self.latent_dim + 4 * (self.latent_dim // TILE)
        latent = _dequantize(rows, self.latent_dim, scales_end)
        rope = rows[..., scales_end:].view(torch.bfloat16)
        return torch.cat([latent.to(torch.bfloat16), rope], -1)


@dataclass(frozen=True)
class IndexFormat:
    """One token of the indexer's cache: its key [D], one scale a token."""

    index_dim: int
    dtype: KvDtype

    @property
    def token_bytes(self) -> int:
        if self.dtype == "bf16":
            return 2 * self.index_dim
        return self.index_dim + 4 * (self.index_dim // TILE)

    def pack(self, keys: Tensor) -> Tensor:
        """keys [T, D] bf16 or fp32 -> [T, token_bytes] uint8."""
        if self.dtype == "bf16":
            return keys.to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat(_quantize(keys), -1)

    def unpack(self, rows: Tensor) -> Tensor:
        """[..., token_bytes] uint8 -> keys [..., D] fp32."""
        if self.dtype == "bf16":
            return rows.view(torch.bfloat16).float()
        return _dequantize(rows, self.index_dim, self.token_bytes)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, D] -> the bytes of its e4m3 values and of its scales, one per tile."""
    tiles = x.float().unflatten(-1, (-1, TILE))
    # A tile of zeros keeps scale 1, so that nothing divides by zero.
    peaks = tiles.abs().amax(-1, keepdim=True)
    scales = torch.where(peaks > 0, peaks / E4M3_MAX, 1.0)
    values = (tiles / scales).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return values.flatten(-2).view(torch.uint8), scales.flatten(-2).view(torch.uint8)


def _dequantize(rows: Tensor, dim: int, scales_end: int) -> Tensor:
    """The first `dim` e4m3 bytes times the scales behind them, [..., dim] fp32."""
    values = rows[..., :dim].view(E4M3).float().unflatten(-1, (-1, TILE))
    scales = rows[..., dim:scales_end].contiguous().view(torch.float32)
    return (values * scales.unsqueeze(-1)).flatten(-2)
