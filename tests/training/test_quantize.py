"""fp8 blocks: shapes, error bound, and the exactness the format promises."""

import pytest
import torch

from training.quantize import dequantize_blocks, quantize_blocks


@pytest.mark.parametrize(
    ("shape", "scales"),
    [((128, 128), (1, 1)), ((576, 256), (5, 2)), ((128, 640), (1, 5))],
)
def test_scale_has_one_entry_per_block(
    shape: tuple[int, int], scales: tuple[int, int]
) -> None:
    quantized, scale_inv = quantize_blocks(torch.randn(shape))
    assert quantized.dtype == torch.float8_e4m3fn
    assert quantized.shape == shape
    assert scale_inv.dtype == torch.float32
    assert scale_inv.shape == scales


def test_values_come_back_within_half_a_step_of_e4m3() -> None:
    """e4m3 keeps 3 fraction bits: relative error 2^-4, absolute 2^-10 below 2^-6."""
    torch.manual_seed(0)
    weight = torch.randn(576, 256)
    quantized, scale_inv = quantize_blocks(weight)
    error = (dequantize_blocks(quantized, scale_inv) - weight).abs()
    floor = 2.0**-10 * scale_inv.max()
    assert (error <= weight.abs() * 2.0**-4 + floor).all()


def test_dequantized_weights_are_exact_in_bf16() -> None:
    restored = dequantize_blocks(*quantize_blocks(torch.randn(256, 200)))
    assert torch.equal(restored.bfloat16().float(), restored)


def test_quantizing_twice_changes_nothing() -> None:
    quantized, scale_inv = quantize_blocks(torch.randn(128, 256))
    again, _ = quantize_blocks(dequantize_blocks(quantized, scale_inv))
    assert torch.equal(again.float(), quantized.float())


def test_zero_block_stays_zero() -> None:
    quantized, scale_inv = quantize_blocks(torch.zeros(128, 128))
    assert torch.equal(dequantize_blocks(quantized, scale_inv), torch.zeros(128, 128))
