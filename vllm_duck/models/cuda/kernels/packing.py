"""Weights as the kernels read them, made once at load.

e4m3 codes k and k + 64 of each 128 lie side by side in a uint16: two masks and shifts
make both bf16 numbers. Their scales are those of the checkpoint times 2**20, with which
a lifted row's result is the plain one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_duck.errors import DuckCheckpointError
from vllm_duck.models.cuda.kernels.formats import CODE_LIFT
from vllm_duck.models.matrix import BLOCK, Matrix

_HALF = BLOCK // 2


@dataclass(frozen=True)
class PackedWeight:
    """B matrices [N, K], one below the other; K is padded with zeros to 128.

    Shapes: P = padded K.
        weight  [B, N, P / 2] uint16, pairs of codes; or [B, N, P] uint16, bf16 bits
        scales  [B, ceil(N / group), P / 128] fp32; None: bf16
    """

    weight: Tensor
    scales: Tensor | None
    # How many rows of a matrix have the same scales, from its first row on.
    group: int
    k: int

    @property
    def heads(self) -> int:
        return self.weight.shape[0]

    @property
    def n(self) -> int:
        return self.weight.shape[1]


def pack(parts: Sequence[Matrix]) -> PackedWeight:
    """Matrices on one input, one below the other, as one.

    Raises:
        DuckCheckpointError: some are e4m3, and others are not.
    """
    k = parts[0].shape[1]
    if all(part.scale is None for part in parts):
        rows = torch.cat([_padded(_bits(part)) for part in parts])
        return PackedWeight(rows[None], None, BLOCK, k)
    group = _common_group([part.shape[0] for part in parts[:-1]])
    codes, scales = [], []
    for part in parts:
        if part.scale is None:
            raise DuckCheckpointError(
                f"{part.name} must be e4m3 as {parts[0].name}, its neighbour, is, got "
                "bf16; quantise both or neither"
            )
        codes.append(_pairs(_codes(part)))
        scales.append(_repeat_scales(part.scale, part.shape[0], group))
    return PackedWeight(torch.cat(codes)[None], _lifted(torch.cat(scales)), group, k)


def pack_heads(
    kv_b: Matrix, heads: int, nope: int
) -> tuple[PackedWeight, PackedWeight]:
    """kv_b_proj [heads * (nope + v), latent] -> (key_up, value_up), head by head.

    key_up takes a query's nope part to the latent, [latent, nope] each; value_up a
    latent to the head's value, [v, latent] each.

    Raises:
        DuckCheckpointError: e4m3, and nope or v is no multiple of 128.
    """
    latent = kv_b.shape[1]
    if kv_b.scale is None:
        both = _bits(kv_b).view(heads, -1, latent)
        keys, values = both[:, :nope].transpose(1, 2), both[:, nope:]
        return (
            PackedWeight(_padded(keys), None, BLOCK, nope),
            PackedWeight(_padded(values), None, BLOCK, latent),
        )
    value = kv_b.shape[0] // heads - nope
    if nope % BLOCK or value % BLOCK:
        raise DuckCheckpointError(
            f"{kv_b.name} in e4m3 must have heads of multiples of {BLOCK} rows, got "
            f"{nope} of keys and {value} of values; use it in bf16"
        )
    both = _codes(kv_b).view(heads, -1, latent)
    keys, values = both[:, :nope].transpose(1, 2), both[:, nope:]
    scales = kv_b.scale.view(heads, -1, kv_b.scale.shape[1])
    cut = nope // BLOCK
    return (
        PackedWeight(_pairs(keys), _lifted(scales[:, :cut].mT), BLOCK, nope),
        PackedWeight(_pairs(values), _lifted(scales[:, cut:]), BLOCK, latent),
    )


def _common_group(sizes: Sequence[int]) -> int:
    """The most rows, up to 128, at whose multiples all parts begin."""
    group = BLOCK
    while any(size % group for size in sizes):
        group //= 2
    return group


def _repeat_scales(scale: Tensor, num_rows: int, group: int) -> Tensor:
    rows = torch.arange(0, num_rows, group) // BLOCK
    return scale[rows.to(scale.device)]


def _lifted(scales: Tensor) -> Tensor:
    scales = (scales.float() * CODE_LIFT).contiguous()
    return scales if scales.dim() == 3 else scales[None]


def _codes(matrix: Matrix) -> Tensor:
    return matrix.weight.view(torch.uint8)


def _bits(matrix: Matrix) -> Tensor:
    return matrix.weight.view(torch.uint16)


def _padded(rows: Tensor) -> Tensor:
    """[..., k] -> [..., P], zeros behind."""
    *shape, k = rows.shape
    padded = torch.zeros(*shape, k + -k % BLOCK, dtype=rows.dtype, device=rows.device)
    padded[..., :k] = rows
    return padded


def _pairs(codes: Tensor) -> Tensor:
    """[..., k] uint8 -> [..., P / 2] uint16."""
    halves = _padded(codes).unflatten(-1, (-1, 2, _HALF))
    # Little-endian: the first byte is the lower one.
    return halves.transpose(-1, -2).contiguous().view(torch.uint16).flatten(-3)
