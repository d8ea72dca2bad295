"""e4m3 weights in 128x128 blocks, as the official checkpoints store them."""

import torch
from torch import Tensor

from training.config import FP8_BLOCK

E4M3_MAX = 448.0


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize one matrix; edge blocks may be smaller than 128.

    Shapes: N rows, M columns.
        weight            [N, M]                        any float
    Returns:
        quantized         [N, M]                        e4m3
        weight_scale_inv  [ceil(N/128), ceil(M/128)]    fp32; weight = quantized * it
    Scales are powers of two (ue8m0), so the product is exact in bf16.
    """
    blocks = _as_blocks(weight.float())
    peak = blocks.abs().amax((1, 3)).clamp(min=1e-12)
    scale_inv = torch.exp2(torch.ceil(torch.log2(peak / E4M3_MAX)))
    scaled = (blocks / scale_inv[:, None, :, None]).flatten(2).flatten(0, 1)
    rows, columns = weight.shape
    quantized = scaled[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    return quantized, scale_inv


def dequantize_blocks(quantized: Tensor, scale_inv: Tensor) -> Tensor:
    """Return the fp32 matrix [N, M] that quantize_blocks stood for."""
    rows, columns = quantized.shape
    spread = scale_inv.repeat_interleave(FP8_BLOCK, 0)
    spread = spread.repeat_interleave(FP8_BLOCK, 1)
    return quantized.float() * spread[:rows, :columns]


def _as_blocks(matrix: Tensor) -> Tensor:
    """Zero-pad [N, M] to whole blocks and view it as [n, 128, m, 128]."""
    rows, columns = matrix.shape
    pad_rows, pad_columns = -rows % FP8_BLOCK, -columns % FP8_BLOCK
    padded = torch.nn.functional.pad(matrix, (0, pad_columns, 0, pad_rows))
    num_row_blocks = padded.shape[0] // FP8_BLOCK
    return padded.view(num_row_blocks, FP8_BLOCK, -1, FP8_BLOCK)
